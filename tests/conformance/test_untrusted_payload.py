"""scatter_unpack of payloads from a faulty or hostile peer.

Status and out match the oracle, and no other memory is written. In most tests, valid payloads
precede and follow the bad ones.
"""

import numpy as np
import pytest
import torch
from oracle import payload
from oracle.payload import Geometry

from conformance import calls, samples

value_dtypes = pytest.mark.parametrize("value_dtype", ["float32", "bfloat16"])
BLOCKS_AND_A_BIT = 3 * 16384 + 100


def valid(geometry, seed=0):
    pool = samples.normal(1000, getattr(torch, geometry.dtype))
    return calls.random_payload(geometry, 0.002, seed, pool)


def statuses(backend, geometry, bad):
    """Compare all results with the oracle; return the statuses of the payloads in `bad`."""
    ranks = [valid(geometry, 1), *bad, valid(geometry, 2)]
    _, status = calls.scatter_unpack(backend, ranks, geometry)
    assert status[0] == status[-1] == 0
    return status[1:-1]


def named_statuses(backend, geometry, cases, r=0):
    """{name: status} of valid payloads in which fields of range r are changed."""
    bad = [rewritten(geometry, r, **changes) for changes in cases.values()]
    return dict(zip(cases, statuses(backend, geometry, bad), strict=True))


def rewritten(geometry, r=0, **changes):
    """A valid payload in which these fields of range r are changed."""
    rows = [bytearray(row) for row in valid(geometry)]
    content = payload.read(rows[r], geometry, r)
    changes = {name: f(content) if callable(f) else f for name, f in changes.items()}
    payload.write(rows[r], geometry, content.but(**changes))
    return [bytes(row) for row in rows]


def written(geometry, content):
    row = bytearray(geometry.nbytes)
    payload.write(row, geometry, content)
    return [bytes(row)]


@pytest.mark.many_launches
def test_every_bit_of_the_header(backend):
    """Every bit flip is detected, except in the two known flags. A reduced count voids blocks."""
    geometry = Geometry(16384 + 50, 50, "float32")
    (row,) = valid(geometry)
    flips = []
    for bit in range(512):
        raw = bytearray(row)
        raw[bit // 8] ^= 1 << bit % 8
        flips.append([bytes(raw)])
    found = statuses(backend, geometry, flips)
    assert found[56:58] == [0, 0]
    count = slice(160, 192)
    assert all(found[count])
    assert found[:56] + found[58:160] + found[192:] == [1] * (512 - 2 - 32)


WRONG_HEADERS = {
    "magic reversed": {"magic": b"1TCD"},
    "entries of two bytes": {"version": 2, "dtype_code": 3},
    "quantized rows": {"version": 3, "dtype_code": 4},
    "dense": {"version": 4},
    "dense quantized": {"version": 4, "dtype_code": 4},
    "the other value dtype": {"dtype_code": lambda c: 1 - c.dtype_code},
    "value dtype 2": {"dtype_code": 2},
    "flag 4": {"flags": 4},
    "flag 4 with known ones": {"flags": 7},
    "all flags": {"flags": 255},
    "numel one less": {"numel": lambda c: c.numel - 1},
    "numel one more": {"numel": lambda c: c.numel + 1},
    "numel all ones": {"numel": 2**64 - 1},
    "numel 0": {"numel": 0},
    "capacity one less": {"capacity": lambda c: c.capacity - 1},
    "capacity one more": {"capacity": lambda c: c.capacity + 1},
    "capacity 0": {"capacity": 0},
    "capacity all ones": {"capacity": 2**32 - 1},
    "count past capacity": {"count": lambda c: c.capacity + 1},
    "count all ones": {"count": 2**32 - 1},
    "count with the sign bit": {"count": 2**31},
    "version 2 with both flags": {"version": 2, "flags": 3},
}


@pytest.mark.parametrize("ranges", [1, 2])
@value_dtypes
def test_a_wrong_header_voids_the_payload(backend, value_dtype, ranges):
    geometry = Geometry(BLOCKS_AND_A_BIT, 120, value_dtype, ranges)
    assert named_statuses(backend, geometry, WRONG_HEADERS) == dict.fromkeys(WRONG_HEADERS, 1)


def test_only_the_range_with_the_wrong_header_is_void(backend):
    geometry = Geometry(BLOCKS_AND_A_BIT, 120, "float32", ranges=2)
    out, status = calls.scatter_unpack(backend, [rewritten(geometry, 1, version=2)], geometry)
    assert status == [1]
    assert out[: 2 * 16384].count_nonzero() > 0
    assert out[2 * 16384 :].count_nonzero() == 0


def start(b, value):
    """A change that sets start b to a number, or to the result of a function of the content."""

    def change(content):
        starts = list(content.starts)
        starts[b] = value(content) % 2**32 if callable(value) else value
        return starts

    return {"starts": change}


# The blocks hold about 33, 33, 33 and 0 entries. The first start is 0 and the last is the count.
WRONG_STARTS = {
    "first not 0": start(0, 1),
    "first all ones": start(0, 2**32 - 1),
    "last below count": start(-1, lambda c: c.count - 1),
    "last past count": start(-1, lambda c: c.count + 1),
    "last all ones": start(-1, 2**32 - 1),
    "last with the sign bit": start(-1, 2**31),
    "descending": start(2, lambda c: c.starts[1] - 1),
    "past count": start(1, lambda c: c.count + 1),
    "far past count": start(1, 2**31 - 1),
    "all ones": start(2, 2**32 - 1),
    "0 in the middle": start(2, 0),
    "all zero": {"starts": lambda c: [0] * len(c.starts)},
    "all count": {"starts": lambda c: [c.count] * len(c.starts)},
    "reversed": {"starts": lambda c: c.starts[::-1]},
    "count 0": {"count": 0},
    "count one less": {"count": lambda c: c.count - 1},
    "count one more": {"count": lambda c: c.count + 1},
}


@value_dtypes
def test_wrong_starts_void_their_blocks(backend, value_dtype):
    found = named_statuses(backend, Geometry(BLOCKS_AND_A_BIT, 120, value_dtype), WRONG_STARTS)
    assert {name: status & 3 for name, status in found.items()} == dict.fromkeys(WRONG_STARTS, 2)


@pytest.mark.parametrize("r", [0, 1])
def test_the_last_start_of_every_range(backend, r):
    """Three blocks in two ranges, so range 1 has fewer starts than the layout has room for."""
    geometry = Geometry(2 * 16384 + 5000, 120, "float32", ranges=2)
    cases = ("last below count", "last past count", "count one less", "count one more")
    found = named_statuses(backend, geometry, {name: WRONG_STARTS[name] for name in cases}, r)
    assert all(status & 2 for status in found.values())


def test_the_only_start_of_an_empty_range(backend):
    """An empty range has no block, and its only start must equal its count, 0."""
    geometry = Geometry(10, 2, "float32", ranges=2)
    bad = [rewritten(geometry, r=1, starts=[value]) for value in (0, 1, 2**32 - 1)]
    assert statuses(backend, geometry, bad) == [0, 2, 2]


def test_the_other_blocks_are_added(backend):
    """A descending start voids the block that ends there. Here it also voids the next block."""
    geometry = Geometry(4 * 16384, 100, "float32")
    indices = np.array([5, 6, 16384, 16390, 32768 + 3, 49152])
    content = payload.content(geometry, 0, indices, [0x3F800000] * 6)
    assert content.starts == [0, 2, 4, 5, 6]
    rows = written(geometry, content.but(starts=[0, 2, 1, 5, 6]))
    out, status = calls.scatter_unpack(backend, [rows], geometry)
    # Block 1 ends before it starts. Block 2 spans entries 1 to 4, whose positions do not ascend.
    assert status == [2 | 4]
    assert out.nonzero().flatten().tolist() == [5, 6, 49152]


def place(entry, value):
    def change(content):
        positions = list(content.positions)
        positions[entry] = value(content) if callable(value) else value
        return positions

    return {"positions": change}


WRONG_POSITIONS = {
    "duplicate": place(1, lambda c: c.positions[0]),
    "descending": place(1, 0),
    "past the block": place(5, 16384),
    "far past the block": place(5, 65535),
    "swapped": {"positions": lambda c: [c.positions[1], c.positions[0], *c.positions[2:]]},
    "all zero": {"positions": lambda c: [0] * len(c.positions)},
    "all ones": {"positions": lambda c: [65535] * len(c.positions)},
}


@value_dtypes
def test_wrong_positions_void_their_block(backend, value_dtype):
    geometry = Geometry(BLOCKS_AND_A_BIT, 120, value_dtype)
    assert named_statuses(backend, geometry, WRONG_POSITIONS) == dict.fromkeys(WRONG_POSITIONS, 4)


def test_positions_in_a_short_last_block(backend):
    geometry = Geometry(16384 + 100, 10, "float32")
    content = payload.content(geometry, 0, np.array([3, 16384 + 50]), [0x3F800000] * 2)
    bad = [written(geometry, content.but(positions=[3, p])) for p in (99, 100, 16383, 65535)]
    assert statuses(backend, geometry, bad) == [0, 4, 4, 4]


def test_more_entries_than_a_block_has_elements(backend):
    """If a block has more entries than elements, some position is past the block."""
    geometry = Geometry(2 * 16384, 2 * 16384, "float32")
    count = 16384 + 20
    content = payload.content(geometry, 0, np.arange(count), [0x3F800000] * count)
    content = content.but(starts=[0, count, count], positions=list(range(count)))
    assert statuses(backend, geometry, [written(geometry, content)]) == [4]


def test_a_bad_first_block_does_not_hide_the_flags(backend):
    geometry = Geometry(BLOCKS_AND_A_BIT, 120, "float32")
    rows = rewritten(geometry, flags=3, **WRONG_POSITIONS["duplicate"])
    out, status = calls.scatter_unpack(backend, [rows], geometry)
    assert status == [4]
    assert out[0].isnan()


@pytest.mark.many_launches
@value_dtypes
def test_garbage_after_a_valid_header(backend, value_dtype):
    """Half of the payloads have a random start. Independently, half have a random position."""
    geometry = Geometry(BLOCKS_AND_A_BIT, 30, value_dtype)
    rng = np.random.default_rng(0)

    def garbage():
        count = int(rng.integers(0, 31))
        starts = [0, *np.sort(rng.integers(0, count + 1, 3)).tolist(), count]
        if rng.random() < 0.5:
            starts[rng.integers(5)] = int(rng.integers(0, 32))
        # The last block has 100 elements.
        positions = np.sort(rng.integers(0, 100, 30))
        if rng.random() < 0.5:
            positions = np.arange(30) * 3
        if rng.random() < 0.5:
            positions[rng.integers(30)] = rng.integers(2**16)
        row = bytearray(rng.bytes(geometry.nbytes))
        content = payload.content(geometry, 0, np.array([], int), [])
        content = content.but(count=count, starts=starts, positions=positions.tolist())
        payload.write(row, geometry, content)
        return [bytes(row)]

    found = set()
    for _ in range(10):
        found |= set(statuses(backend, geometry, [garbage() for _ in range(10)]))
    assert found == {0, 2, 4, 6}
