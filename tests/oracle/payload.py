"""The payload's bytes, by the published offsets: header | starts | positions | values.

Of dtype "e3m0", version 2: header | starts, sub-starts | positions with values.
"""

import itertools
import struct
from dataclasses import dataclass, replace

import numpy as np

from . import e3m0, floats

BLOCK, SUB_BLOCK = 16384, 4096
HEADER = struct.Struct("<4sHBBQII40s")
MAGIC = b"DCT1"
CODES = {"float32": 0, "bfloat16": 1, "e3m0": 3}
OVERFLOW, NON_FINITE, DAMAGE = 1, 2, 4


@dataclass(frozen=True)
class Geometry:
    """What sender and receiver agree on: enough to find every byte."""

    numel: int
    capacity: int
    dtype: str
    ranges: int = 1

    @property
    def range_blocks(self):
        return _ceil_div(_ceil_div(self.numel, BLOCK), self.ranges)

    def bounds(self, r):
        length = self.range_blocks * BLOCK
        return min(r * length, self.numel), min((r + 1) * length, self.numel)

    def blocks(self, r):
        low, high = self.bounds(r)
        return _ceil_div(high - low, BLOCK)

    @property
    def itemsize(self):
        return np.dtype(floats.BITS[self.dtype]).itemsize

    @property
    def starts(self):
        return 64

    @property
    def sub_starts(self):
        return self.starts + 4 * (self.range_blocks + 1)

    @property
    def positions(self):
        if self.dtype == "e3m0":
            return _align16(self.sub_starts + 6 * self.range_blocks)
        return _align16(self.starts + 4 * (self.range_blocks + 1))

    @property
    def values(self):
        if self.dtype == "e3m0":
            return self.positions
        return _align16(self.positions + 2 * self.capacity)

    @property
    def nbytes(self):
        if self.dtype == "e3m0":
            return _align16(self.positions + 2 * self.capacity)
        return _align16(self.values + self.itemsize * self.capacity)


@dataclass(frozen=True)
class Content:
    """What one range's payload says; `starts`, `positions`, `values` (raw bits) are lists.

    In e3m0 positions are those in sub-blocks, values the low four bits, and `sub_starts` has three
    for each block.
    """

    numel: int
    capacity: int
    count: int
    starts: list
    positions: list
    values: list
    flags: int = 0
    dtype_code: int = 0
    magic: bytes = MAGIC
    version: int = 1
    reserved: bytes = bytes(40)
    sub_starts: tuple = ()

    @property
    def scale(self):
        """Of e3m0."""
        return 2.0 ** (self.reserved[0] - 127)

    def but(self, **changes):
        return replace(self, **changes)


def read(row, geometry, r):
    """The content of range r's bytes; no more entries than there is room for."""
    magic, version, code, flags, numel, capacity, count, reserved = HEADER.unpack_from(row)
    entries = min(count, geometry.capacity)
    positions, sub_starts = _list(row, geometry.positions, entries, "H"), []
    if geometry.dtype == "e3m0":
        values, positions = [e & 15 for e in positions], [e >> 4 for e in positions]
        sub_starts = _list(row, geometry.sub_starts, 3 * geometry.blocks(r), "H")
    else:
        value_format = "I" if geometry.itemsize == 4 else "H"
        values = _list(row, geometry.values, entries, value_format)
    return Content(
        numel=numel,
        capacity=capacity,
        count=count,
        starts=_list(row, geometry.starts, geometry.blocks(r) + 1, "I"),
        sub_starts=sub_starts,
        positions=positions,
        values=values,
        flags=flags,
        dtype_code=code,
        magic=magic,
        version=version,
        reserved=reserved,
    )


def write(row, geometry, content):
    """Put `content` into the bytearray `row`, and leave its other bytes as they are."""
    HEADER.pack_into(
        row,
        0,
        content.magic,
        content.version,
        content.dtype_code,
        content.flags,
        content.numel,
        content.capacity,
        content.count,
        content.reserved,
    )
    _put(row, geometry.starts, content.starts, "I")
    if geometry.dtype == "e3m0":
        _put(row, geometry.sub_starts, content.sub_starts, "H")
        entries = [p << 4 | v for p, v in zip(content.positions, content.values, strict=True)]
        return _put(row, geometry.positions, entries, "H")
    _put(row, geometry.positions, content.positions, "H")
    _put(row, geometry.values, content.values, "I" if geometry.itemsize == 4 else "H")


def content(geometry, r, indices, values, flags=0, scale=1.0):
    """The content that says: these ascending indices into range r hold these raw values."""
    low, high = geometry.bounds(r)
    edges = [b * BLOCK for b in range(geometry.blocks(r))]
    starts = [int(np.searchsorted(indices, edge)) for edge in edges] + [len(indices)]
    version, reserved, sub_starts, group = 1, bytes(40), [], BLOCK
    if geometry.dtype == "e3m0":
        version, reserved, group = 2, e3m0.biased(scale).to_bytes(40, "little"), SUB_BLOCK
        for edge, start in zip(edges, starts, strict=False):
            inner = [edge + SUB_BLOCK, edge + 2 * SUB_BLOCK, edge + 3 * SUB_BLOCK]
            sub_starts += [int(np.searchsorted(indices, e)) - start for e in inner]
    return Content(
        numel=high - low,
        capacity=geometry.capacity,
        count=len(indices),
        starts=starts,
        sub_starts=sub_starts,
        positions=[int(i) % group for i in indices],
        values=[int(v) for v in values],
        flags=flags,
        dtype_code=CODES[geometry.dtype],
        version=version,
        reserved=reserved,
    )


def indices(content):
    """Index into the range of every entry of a sound payload."""
    found = []
    for b in range(len(content.starts) - 1):
        first, end = content.starts[b], content.starts[b + 1]
        edges = [first, *(first + s for s in content.sub_starts[3 * b : 3 * b + 3]), end]
        for q, (low, high) in enumerate(itertools.pairwise(edges)):
            found += [b * BLOCK + q * SUB_BLOCK + p for p in content.positions[low:high]]
    return found


def _list(row, offset, count, code):
    return list(struct.unpack_from(f"<{count}{code}", row, offset))


def _put(row, offset, numbers, code):
    struct.pack_into(f"<{len(numbers)}{code}", row, offset, *numbers)


def _ceil_div(a, b):
    return -(-a // b)


def _align16(offset):
    return _ceil_div(offset, 16) * 16
