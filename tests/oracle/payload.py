"""The bytes of a payload at the published offsets: header | starts | positions | values."""

import struct
from dataclasses import dataclass, replace

import numpy as np

from . import floats

BLOCK = 16384
HEADER = struct.Struct("<4sHBBQII40s")
MAGIC = b"DCT1"
CODES = {"float32": 0, "bfloat16": 1}
OVERFLOW, NON_FINITE = 1, 2


def bounds(numel, ranges, r):
    """The first element of range r, and the first one after the range."""
    length = _ceil_div(_ceil_div(numel, BLOCK), ranges) * BLOCK
    return min(r * length, numel), min((r + 1) * length, numel)


@dataclass(frozen=True)
class Geometry:
    """The parameters that sender and receiver share. They determine every offset."""

    numel: int
    capacity: int
    dtype: str
    ranges: int = 1

    def bounds(self, r):
        return bounds(self.numel, self.ranges, r)

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
    def positions(self):
        return _align16(self.starts + 4 * (self.blocks(0) + 1))

    @property
    def values(self):
        return _align16(self.positions + 2 * self.capacity)

    @property
    def nbytes(self):
        return _align16(self.values + self.itemsize * self.capacity)


@dataclass(frozen=True)
class Content:
    """The fields of one range's payload; `starts`, `positions`, `values` (raw bits) are lists."""

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

    def but(self, **changes):
        return replace(self, **changes)


def read(row, geometry, r):
    """Read the content of range r, with at most `geometry.capacity` entries."""
    magic, version, code, flags, numel, capacity, count, reserved = HEADER.unpack_from(row)
    entries = min(count, geometry.capacity)
    return Content(
        numel=numel,
        capacity=capacity,
        count=count,
        starts=_list(row, geometry.starts, geometry.blocks(r) + 1, "I"),
        positions=_list(row, geometry.positions, entries, "H"),
        values=_list(row, geometry.values, entries, "I" if geometry.itemsize == 4 else "H"),
        flags=flags,
        dtype_code=code,
        magic=magic,
        version=version,
        reserved=reserved,
    )


def write(row, geometry, content):
    """Write `content` into the bytearray `row`; other bytes are unchanged."""
    c = content
    kind = c.magic, c.version, c.dtype_code, c.flags
    HEADER.pack_into(row, 0, *kind, c.numel, c.capacity, c.count, c.reserved)
    _put(row, geometry.starts, content.starts, "I")
    _put(row, geometry.positions, content.positions, "H")
    _put(row, geometry.values, content.values, "I" if geometry.itemsize == 4 else "H")


def content(geometry, r, indices, values, flags=0):
    """The content with these raw values at these ascending indices of range r."""
    low, high = geometry.bounds(r)
    edges = [b * BLOCK for b in range(geometry.blocks(r))]
    starts = [int(np.searchsorted(indices, edge)) for edge in edges] + [len(indices)]
    return Content(
        numel=high - low,
        capacity=geometry.capacity,
        count=len(indices),
        starts=starts,
        positions=[int(i) % BLOCK for i in indices],
        values=[int(v) for v in values],
        flags=flags,
        dtype_code=CODES[geometry.dtype],
    )


def indices(content):
    """The indices of all entries within their range. The payload must be valid."""
    found = []
    for b in range(len(content.starts) - 1):
        for entry in range(content.starts[b], content.starts[b + 1]):
            found.append(b * BLOCK + content.positions[entry])
    return found


def _list(row, offset, count, code):
    return list(struct.unpack_from(f"<{count}{code}", row, offset))


def _put(row, offset, numbers, code):
    struct.pack_into(f"<{len(numbers)}{code}", row, offset, *numbers)


def _ceil_div(a, b):
    return -(-a // b)


def _align16(offset):
    return _ceil_div(offset, 16) * 16
