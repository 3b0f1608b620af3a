"""row_dequantize_sum: sums the quantized rows of all ranks.

A tile of the output stays in registers while the kernel adds the ranks in order. The next rank's
bytes are loaded before the current rank's bytes are used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import row_layout
from . import _rows
from ._launch import launch
from ._numeric import round_to
from .row_dequantize import codes, load_scales


@triton.jit(do_not_specialize=["ranks", "rows"])
def _row_dequantize_sum_kernel(
    quantized, out, ranks, rows, width, FORMAT: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = _rows.rows_of_program(ROWS)
    code_bytes = (width - 1) // EACH + 1
    message_bytes = rows.to(tl.int64) * (code_bytes + 2)
    for tile in range(TILES):
        column = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < width)
        source = quantized + row * (code_bytes + 2)
        scale = load_scales(source + code_bytes, row < rows)
        byte = tl.load(source + column // EACH, mask=inside, other=0)
        # Start from -0.0, because adding a value to -0.0 returns that value. The constant is given
        # as bits, because Triton 3.6 treats a float -0.0 as 0.0.
        total = tl.full([ROWS, BLOCK], -(2**31), tl.int32).to(tl.float32, bitcast=True)
        rank = ranks * 0
        while rank < ranks:
            rank += 1
            source += message_bytes
            more = row < tl.where(rank < ranks, rows, 0)
            next_scale = load_scales(source + code_bytes, more)
            next_byte = tl.load(source + column // EACH, mask=inside & more, other=0)
            total += codes(byte, column % EACH, FORMAT) * scale
            scale, byte = next_scale, next_byte
        tl.store(out + row * width + column, round_to(total, out.dtype.element_ty), mask=inside)


def row_dequantize_sum(rows: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    ranks, batch, _ = rows.shape
    out = rows.new_empty(batch, width, dtype=dtype)
    tiles = _rows.tiles(width)
    launch(
        _row_dequantize_sum_kernel,
        triton.cdiv(batch, tiles.rows),
        *(rows, out, ranks, batch, width),
        FORMAT=format,
        EACH=row_layout.CODES_PER_BYTE[format],
        ROWS=tiles.rows,
        BLOCK=tiles.block,
        TILES=tiles.count,
        device=rows.device,
        num_warps=tiles.num_warps,
    )
    return out
