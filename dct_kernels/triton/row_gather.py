"""row_gather: gathers k values of each row, at the positions of an earlier row_pack."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..row_layout import position_encoding
from . import _rows
from ._launch import launch
from ._numeric import round_to, to_float


@triton.jit(do_not_specialize=["rows"])
def _bitmap_kernel(
    x, positions, values, rows, width, k,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = _rows.rows_of_program(ROWS)
    before = tl.zeros([ROWS, 1], tl.int32)  # bits in earlier tiles of the row
    for tile in range(TILES):
        start = tile * BLOCK
        slot, before = _rows.load_slots(positions, row, rows, start, width, before, BLOCK)
        # Load the whole tile, because wide loads are faster. Up to width 65,536, a bitmap selects
        # at least 1/16 of the columns.
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < width)
        elements = to_float(tl.load(x + row * width + column, mask=inside, other=0))
        elements = round_to(elements, values.dtype.element_ty)
        tl.store(values + row * k + slot, elements, mask=(slot >= 0) & (slot < k))
    # Store 0 in slots without a bit. Valid positions have a bit for every slot.
    first = tl.min(before)
    while first < k:
        slot = first + tl.arange(0, BLOCK)[None, :]
        missing = (row < rows) & (slot >= before) & (slot < k)
        tl.store(values + row * k + slot, tl.zeros([ROWS, BLOCK], values.dtype.element_ty), missing)
        first += BLOCK


@triton.jit(do_not_specialize=["rows"])
def _list_kernel(
    x, positions, values, rows, width, k,
    COLUMN_BYTES: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = _rows.rows_of_program(ROWS)
    slot = tl.arange(0, SLOTS)[None, :]
    column = _rows.load_columns(positions, row, rows, slot, width, k, COLUMN_BYTES)
    elements = to_float(tl.load(x + row * width + column, mask=column >= 0, other=0))
    elements = round_to(elements, values.dtype.element_ty)
    tl.store(values + row * k + slot, elements, mask=(row < rows) & (slot < k))


def row_gather(x: Tensor, positions: Tensor, k: int, value_dtype: torch.dtype) -> Tensor:
    rows, width = x.shape
    values = x.new_empty(rows, k, dtype=value_dtype)
    column_bytes = _rows.COLUMN_BYTES[position_encoding(width, k)]
    if column_bytes == 0:
        kernel, tiles = _bitmap_kernel, _rows.tiles(width)
        constants = {"BLOCK": tiles.block, "TILES": tiles.count}
    else:
        # Few rows per program, even in the interpreter, which runs scans element by element.
        kernel, tiles = _list_kernel, _rows.tiles(k, _rows.WARP_ELEMENTS)
        constants = {"SLOTS": tiles.block, "COLUMN_BYTES": column_bytes}
    launch(
        kernel,
        triton.cdiv(rows, tiles.rows),
        *(x, positions, values, rows, width, k),
        ROWS=tiles.rows,
        **constants,
        device=x.device,
        num_warps=tiles.num_warps,
    )
    return values
