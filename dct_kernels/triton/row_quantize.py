"""row_quantize: quantizes all entries of every row.

A wide row is read tile by tile: once for its largest magnitude, once for its mean magnitude, and
once for its codes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import row_layout
from . import _rows
from ._codes import ROUND_TO_INTEGER, scale_bits, units
from ._launch import launch
from ._numeric import FLOAT32_INFINITY, FLOAT32_NAN, to_float


@triton.jit
def _load(x, row, rows, width, tile, BLOCK: tl.constexpr):
    """The elements of a tile in float32, with 0 in padding, their columns, and the mask of real
    elements."""
    column = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    return to_float(tl.load(x + row * width + column, mask=inside, other=0)), column, inside


@triton.jit(do_not_specialize=["rows"])
def _row_quantize_kernel(
    x, out, rows, width, FORMAT: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = _rows.rows_of_program(ROWS)
    top = tl.zeros([ROWS, 1], tl.int32)
    for tile in range(TILES):
        elements, _, _ = _load(x, row, rows, width, tile, BLOCK)
        magnitude = elements.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        top = tl.maximum(top, tl.max(magnitude, 1)[:, None])
    finite = top < FLOAT32_INFINITY

    in_one, unit = units(top)
    if FORMAT == "sign":
        total = tl.zeros([ROWS, 1], tl.int64)
        for tile in range(TILES):
            elements, _, _ = _load(x, row, rows, width, tile, BLOCK)
            magnitude = tl.where(finite, tl.abs(elements), 0.0) * in_one
            total += tl.sum(magnitude.to(tl.int32).to(tl.int64), 1)[:, None]
        count = tl.full([ROWS, 1], 1, tl.int32) * width
        exact = tl.div_rn(total.to(tl.float32), count.to(tl.float32)) * unit
    else:
        levels = tl.full([ROWS, 1], 127.0 if FORMAT == "int8" else 7.0, tl.float32)
        exact = tl.div_rn(tl.where(finite, top, 0).to(tl.float32, bitcast=True), levels)
    scale = scale_bits(exact)
    usable = finite & (scale != 0)
    rounded = tl.where(usable, scale << 16, 0x3F800000).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), rounded)
    scale = tl.where(finite, scale, FLOAT32_NAN >> 16)

    code_bytes = (width - 1) // EACH + 1
    target = out + row * (code_bytes + 2)
    for tile in range(TILES):
        elements, column, inside = _load(x, row, rows, width, tile, BLOCK)
        elements = tl.where(usable, elements, 0.0)
        if FORMAT == "sign":
            codes = (elements < 0).to(tl.int32) << column % 8
        else:
            codes = (elements * inverse + ROUND_TO_INTEGER).to(tl.int32, bitcast=True)
            if FORMAT == "int4":
                codes = (codes & 15) << 4 * (column % 2)
        codes = tl.where(inside & usable, codes, 0)
        packed = tl.sum(tl.reshape(codes, [ROWS, BLOCK // EACH, EACH]), 2)
        byte = tile * (BLOCK // EACH) + tl.arange(0, BLOCK // EACH)[None, :]
        packed = (packed & 255).to(tl.uint8)
        tl.store(target + byte, packed, mask=(row < rows) & (byte < code_bytes))
    half = tl.arange(0, 2)[None, :]
    tl.store(target + code_bytes + half, (scale >> 8 * half & 255).to(tl.uint8), mask=row < rows)


def row_quantize(x: Tensor, format: str) -> Tensor:
    rows, width = x.shape
    out = x.new_empty(rows, row_layout.row_bytes(width, format), dtype=torch.uint8)
    each = row_layout.CODES_PER_BYTE[format]
    tiles = _rows.tiles(row_layout.code_bytes(width, format) * each)
    launch(
        _row_quantize_kernel,
        triton.cdiv(rows, tiles.rows),
        *(x, out, rows, width),
        FORMAT=format,
        EACH=each,
        ROWS=tiles.rows,
        BLOCK=tiles.block,
        TILES=tiles.count,
        device=x.device,
        num_warps=tiles.num_warps,
    )
    return out
