"""Ranges and headers, for the ops that write or read payloads."""

import triton
import triton.language as tl

from .. import layout

BLOCK = tl.constexpr(layout.BLOCK)
HEADER_BYTES = tl.constexpr(layout.HEADER_BYTES)
FLAG_OVERFLOW = tl.constexpr(layout.FLAG_OVERFLOW)
FLAG_NON_FINITE = tl.constexpr(layout.FLAG_NON_FINITE)


@triton.jit
def locate(numel, range_blocks, range_tiles, TILE: tl.constexpr, UNIT: tl.constexpr = BLOCK):
    """Return the tile of this program: its range, first element and length (<= 0: no tile)."""
    range_index = (tl.program_id(0) // range_tiles).to(tl.int64)
    start = (tl.program_id(0) % range_tiles).to(tl.int64) * TILE
    length = tl.minimum(range_numel(numel, range_blocks, range_index, UNIT) - start, TILE)
    return range_index, range_index * range_blocks * UNIT + start, length


@triton.jit
def range_numel(numel, range_blocks, range_index, UNIT: tl.constexpr = BLOCK):
    """The elements of a range. A full range has `range_blocks` blocks of UNIT elements."""
    length = range_blocks.to(tl.int64) * UNIT
    return tl.minimum(tl.maximum(numel - range_index * length, 0), length)


@triton.jit
def write_header(payload, numel, capacity, count, flags, KIND: tl.constexpr):
    lane = tl.arange(0, 8)
    header = tl.where(lane == 0, flags << 56 | KIND, 0)
    header = tl.where(lane == 1, numel, header)
    header = tl.where(lane == 2, capacity | count << 32, header)
    tl.store(payload.to(tl.pointer_type(tl.int64)) + lane, header)
