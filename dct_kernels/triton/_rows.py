"""Tiles of rows and encodings of positions, shared by the row kernels.

Tiles are [ROWS, BLOCK]. `row` is int64 [ROWS, 1], so every address has 64 bits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..row_layout import Encoding
from ._launch import INTERPRETED

# The constant COLUMN_BYTES of kernels for each encoding: bytes per column index, 0 for a bitmap.
COLUMN_BYTES = {Encoding.BITMAP: 0, Encoding.UINT8: 1, Encoding.UINT16: 2}

WIDEST = 4096  # columns that a program holds together; wider rows are read tile by tile
WARP_ELEMENTS = 512  # 16 per thread of a warp; more would take too many registers
# The interpreter's time depends on the number of programs, not on their size.
PROGRAM_ELEMENTS = 16 * WARP_ELEMENTS if INTERPRETED else WARP_ELEMENTS


class Tiles(NamedTuple):
    """The tiles in which a program processes its rows."""

    rows: int
    block: int  # columns of a tile, a power of two
    count: int  # type: ignore[assignment]  # tiles per row; replaces tuple.count
    num_warps: int


def tiles(width: int, elements: int = PROGRAM_ELEMENTS) -> Tiles:
    """Choose tiles. A tile has several short rows, one row, or some columns of a wide row."""
    block = min(max(triton.next_power_of_2(width), 8), WIDEST)
    count = triton.cdiv(width, block)
    rows = max(elements // block, 1) if count == 1 else 1
    return Tiles(rows, block, count, rows * block // WARP_ELEMENTS)


@triton.jit
def rows_of_program(ROWS: tl.constexpr):
    return (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]


@triton.jit
def load_slots(positions, row, rows, start, width, before, BLOCK: tl.constexpr):
    """Decode columns start, start + 1, ... of a bitmap. Earlier columns have `before` set bits.

    Return the slot of every column, int32 [ROWS, BLOCK], or -1 if its bit is not set. Also return
    the number of set bits up to the end of the tile, [ROWS, 1].
    """
    ROWS: tl.constexpr = row.shape[0]
    row_bytes = (width - 1) // 8 + 1
    byte = start // 8 + tl.arange(0, BLOCK // 8)[None, :]
    inside = (row < rows) & (byte < row_bytes)
    packed = tl.load(positions + row * row_bytes + byte, mask=inside, other=0).to(tl.uint32)
    # Clear the bits past the width.
    packed &= (1 << tl.minimum(tl.maximum(width - 8 * byte, 0), 8)) - 1
    # Move bit i to 4-bit digit i. Digit i of the product counts the set bits among bits 0 to i.
    spread = (packed | packed << 12) & 0x000F000F
    spread = (spread | spread << 6) & 0x03030303
    spread = (spread | spread << 3) & 0x11111111
    ranks = spread * 0x11111111
    count = (ranks >> 28).to(tl.int32)
    slot = before + tl.cumsum(count, 1) - count
    bit = tl.arange(0, 8)[None, None, :]
    rank = ((ranks << 4)[:, :, None] >> 4 * bit).to(tl.int32) & 15
    slot = tl.where(packed[:, :, None] >> bit & 1 != 0, slot[:, :, None] + rank, -1)
    return tl.reshape(slot, [ROWS, BLOCK]), before + tl.sum(count, 1)[:, None]


@triton.jit
def store_bits(positions, row, rows, start, width, bits, BLOCK: tl.constexpr):
    """Encode a tile of a bitmap. `bits`, int32 [ROWS, BLOCK], starts at column `start`."""
    ROWS: tl.constexpr = row.shape[0]
    row_bytes = (width - 1) // 8 + 1
    byte = start // 8 + tl.arange(0, BLOCK // 8)[None, :]
    bits = tl.reshape(bits, [ROWS, BLOCK // 8, 8]) << tl.arange(0, 8)[None, None, :]
    inside = (row < rows) & (byte < row_bytes)
    tl.store(positions + row * row_bytes + byte, tl.sum(bits, 2).to(tl.uint8), mask=inside)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def load_columns(positions, row, rows, slot, width, k, COLUMN_BYTES: tl.constexpr):
    """int32 [ROWS, SLOTS]: a list's column indices, with -1 for columns that are not accepted."""
    inside = (row < rows) & (slot < k)
    entry = positions + (row * k + slot) * COLUMN_BYTES
    column = tl.load(entry, mask=inside, other=0).to(tl.int32)
    if COLUMN_BYTES == 2:  # byte by byte, because the address may be odd
        column |= tl.load(entry + 1, mask=inside, other=0).to(tl.int32) << 8
    candidate = inside & (column < width)
    # Keys are ordered by column. For equal columns, the earlier slot has the larger key. If a key
    # equals the running maximum, its column is larger than all valid columns in earlier slots. A
    # list has fewer than 4096 slots.
    key = tl.where(candidate, column << 12 | (4095 - slot), -1)
    accepted = candidate & (tl.associative_scan(key, 1, _larger) == key)
    return tl.where(accepted, column, -1)
