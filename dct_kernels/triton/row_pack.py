"""row_pack: exact top-k of every row.

A program holds the keys of a few narrow rows in registers. It finds the k-th largest key of each
row by bisection. To get a first lower bound, it splits the keys of a row into more than k groups.
The smallest group maximum is the bound, because more than k keys reach it. The search of a row ends
when exactly k keys are selected, or when only equal keys remain. If keys are equal, lower columns
are selected. Wide rows use radix selection, which reads a row tile by tile, once for each 8-bit
digit of the keys. The row is then read once more, to store the selected entries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..row_layout import Encoding, position_bytes, position_encoding
from . import _rows
from ._launch import launch
from ._numeric import magnitude_key, round_to, to_float

# Keys are float32 magnitudes of 31 bits. Keys of narrower types end in zeros, which the search
# skips.
LOWEST_BIT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def _load_keys(x, row, rows, column, width):
    """The elements as float32, and their keys, which are -1 outside the tensor."""
    inside = (row < rows) & (column < width)
    elements = to_float(tl.load(x + row * width + column, mask=inside, other=0))
    return elements, tl.where(inside, magnitude_key(elements), -1)


@triton.jit
def _store_chosen(
    values, positions, elements, keys, cut, ties, above_before, equal_before,
    row, rows, start, width, k, COLUMN_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the elements with keys above `cut`, and the row's first `ties` elements with key `cut`.

    `above_before` and `equal_before` [ROWS, 1] count the keys above `cut` and equal to `cut` in
    earlier tiles of the row. Return the counts for the next tile.
    """
    column = start + tl.arange(0, BLOCK)[None, :]
    above = keys > cut
    equal = keys == cut
    # Two counts of at most BLOCK < 2**16 in one scan.
    counts = above.to(tl.int32) | equal.to(tl.int32) << 16
    before = tl.cumsum(counts, 1) - counts
    total = tl.sum(counts, 1)[:, None]
    equal_rank = equal_before + (before >> 16)
    chosen = above | (equal & (equal_rank < ties))
    slot = above_before + (before & 0xFFFF) + tl.minimum(equal_rank, ties)
    target = row * k + slot
    tl.store(values + target, round_to(elements, values.dtype.element_ty), mask=chosen)
    if COLUMN_BYTES == 0:
        _rows.store_bits(positions, row, rows, start, width, chosen.to(tl.int32), BLOCK)
    else:
        tl.store(positions + target, column.to(positions.dtype.element_ty), mask=chosen)
    return above_before + (total & 0xFFFF), equal_before + (total >> 16)


@triton.jit(do_not_specialize=["rows"])
def _narrow_kernel(
    x, values, positions, rows, width, k,
    COLUMN_BYTES: tl.constexpr, LOWEST_BIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    row = _rows.rows_of_program(ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    elements, keys = _load_keys(x, row, rows, column, width)
    # At least k keys reach `cut`. At most k keys reach `high`; their number is `above`.
    UNIT: tl.constexpr = 1 << LOWEST_BIT
    cut = tl.zeros([ROWS, 1], tl.int32)
    if GROUPS < BLOCK:  # groups past the end of a row, or past the last row, have no effect
        of_groups = tl.max(tl.reshape(keys, [ROWS, BLOCK // GROUPS, GROUPS]), 1)
        cut = tl.maximum(cut, tl.min(of_groups, 1)[:, None])
    high = tl.max(keys, 1)[:, None] + UNIT
    above = tl.zeros([ROWS, 1], tl.int32)
    while tl.max(high - cut) > UNIT:
        open = high - cut > UNIT
        middle = cut + (high - cut >> LOWEST_BIT + 1 << LOWEST_BIT)
        count = tl.sum((keys >= middle).to(tl.int32), 1)[:, None]
        cut = tl.where(open & (count > k), middle, cut)
        # If exactly k keys reach `middle`, the selected keys are those above `cut`.
        cut = tl.where(open & (count == k), middle - UNIT, cut)
        above = tl.where(open & (count <= k), count, above)
        high = tl.where(open & (count <= k), middle, high)
    ties = k - above
    none = tl.zeros([ROWS, 1], tl.int32)
    _store_chosen(
        values, positions, elements, keys, cut, ties, none, none,
        row, rows, 0, width, k, COLUMN_BYTES, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _wide_kernel(
    x, values, positions, rows, width, k,
    COLUMN_BYTES: tl.constexpr, LOWEST_BIT: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = _rows.rows_of_program(1)
    digits = tl.arange(0, 256)
    prefix = 0  # the digits found so far of the k-th largest key, the most significant digits first
    above = 0  # number of keys whose leading digits are above `prefix`
    for shift in tl.static_range(24, -1, -8):
        if shift + 8 > LOWEST_BIT:
            counts = tl.zeros([256], tl.int32)
            for tile in range(TILES):
                column = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
                _, keys = _load_keys(x, row, rows, column, width)
                keys = tl.reshape(keys >> shift, [BLOCK])
                counts += tl.histogram(keys & 255, 256, mask=(keys >> 8) == prefix)
            at_least = above + tl.cumsum(counts, 0, reverse=True)
            # `at_least` decreases with the digit. Choose the largest digit with `at_least` >= k.
            digit = tl.sum((at_least >= k).to(tl.int32)) - 1
            above = tl.max(tl.where(digits > digit, at_least, above))
            prefix = prefix << 8 | digit
        else:
            prefix = prefix << 8
    above_before = tl.zeros([1, 1], tl.int32)
    equal_before = tl.zeros([1, 1], tl.int32)
    for tile in range(TILES):
        start = tile * BLOCK
        column = start + tl.arange(0, BLOCK)[None, :]
        elements, keys = _load_keys(x, row, rows, column, width)
        above_before, equal_before = _store_chosen(
            values, positions, elements, keys, prefix, k - above, above_before, equal_before,
            row, rows, start, width, k, COLUMN_BYTES, BLOCK,
        )  # fmt: skip


def row_pack(x: Tensor, k: int, value_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    encoding = position_encoding(width, k)
    values = x.new_empty(rows, k, dtype=value_dtype)
    positions = x.new_empty(rows, position_bytes(width, k), dtype=torch.uint8)
    columns = positions.view(torch.uint16) if encoding is Encoding.UINT16 else positions
    tiles = _rows.tiles(width)
    if tiles.count == 1:
        # More than k groups, so that more than k keys reach the initial bound. The search tests
        # only later bounds for exactly k keys.
        groups = triton.next_power_of_2(k + 1)
        kernel, constants = _narrow_kernel, {"ROWS": tiles.rows, "GROUPS": groups}
    else:
        kernel, constants = _wide_kernel, {"TILES": tiles.count}
    launch(
        kernel,
        triton.cdiv(rows, tiles.rows),
        *(x, values, columns, rows, width, k),
        COLUMN_BYTES=_rows.COLUMN_BYTES[encoding],
        LOWEST_BIT=LOWEST_BIT[x.dtype],
        BLOCK=tiles.block,
        **constants,
        device=x.device,
        num_warps=tiles.num_warps,
    )
    return values, positions
