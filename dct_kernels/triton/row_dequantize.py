"""row_dequantize: dequantizes rows.

The kernel loads the byte of a code for each element, so a byte with several codes is loaded
several times, mostly from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import row_layout
from . import _rows
from ._launch import launch
from ._numeric import round_to


@triton.jit
def load_scales(at, inside):
    """Load the scales of rows, two bytes at each address, as float32."""
    low = tl.load(at, mask=inside, other=0).to(tl.int32)
    high = tl.load(at + 1, mask=inside, other=0).to(tl.int32)
    return (low << 16 | high << 24).to(tl.float32, bitcast=True)


@triton.jit
def codes(byte, digit, FORMAT: tl.constexpr):
    """The code at position `digit` of each byte, in float32."""
    code = byte.to(tl.int32)
    if FORMAT == "int8":
        code = (code ^ 128) - 128
    elif FORMAT == "int4":
        code = ((code >> 4 * digit & 15) ^ 8) - 8
    else:
        code = 1 - 2 * (code >> digit & 1)
    return code.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _row_dequantize_kernel(
    quantized, out, rows, width, FORMAT: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = _rows.rows_of_program(ROWS)
    code_bytes = (width - 1) // EACH + 1
    source = quantized + row * (code_bytes + 2)
    scale = load_scales(source + code_bytes, row < rows)
    for tile in range(TILES):
        column = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < width)
        byte = tl.load(source + column // EACH, mask=inside, other=0)
        elements = round_to(codes(byte, column % EACH, FORMAT) * scale, out.dtype.element_ty)
        tl.store(out + row * width + column, elements, mask=inside)


def row_dequantize(rows: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    batch = rows.shape[0]
    out = rows.new_empty(batch, width, dtype=dtype)
    tiles = _rows.tiles(width)
    launch(
        _row_dequantize_kernel,
        triton.cdiv(batch, tiles.rows),
        *(rows, out, batch, width),
        FORMAT=format,
        EACH=row_layout.CODES_PER_BYTE[format],
        ROWS=tiles.rows,
        BLOCK=tiles.block,
        TILES=tiles.count,
        device=rows.device,
        num_warps=tiles.num_warps,
    )
    return out
