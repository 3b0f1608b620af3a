"""dequantize_sum of payloads from a faulty or hostile peer.

A range with a wrong header is not added, and its payload has status 1. Any bytes are valid rows.
In most tests of headers, valid payloads precede and follow the bad ones.
"""

import math

import numpy as np
import pytest
from oracle import payload
from oracle import quantized_payload as oracle
from oracle.quantized_payload import Geometry

from conformance import bits, quantized_calls
from conformance.quantized_calls import random_payload

formats = pytest.mark.parametrize("format", oracle.FORMATS)


def statuses(backend, geometry, bad):
    """Compare all results with the oracle; return the statuses of the payloads in `bad`."""
    ranks = [random_payload(geometry, 1), *bad, random_payload(geometry, 2)]
    out, status = quantized_calls.dequantize_sum(backend, ranks, geometry)
    assert status[0] == status[-1] == 0
    if all(status[1:-1]) and geometry.ranges == 1:
        alone, _ = quantized_calls.dequantize_sum(backend, [ranks[0], ranks[-1]], geometry)
        assert bits.raw(out).tolist() == bits.raw(alone).tolist()
    return status[1:-1]


@pytest.mark.many_launches
@formats
def test_every_bit_of_the_header(backend, format):
    """Every bit flip is detected, except in the flag "non-finite"."""
    geometry = Geometry(70, format)
    (valid,) = random_payload(geometry)
    flips = []
    for bit in range(512):
        raw = bytearray(valid)
        raw[bit // 8] ^= 1 << bit % 8
        flips.append([bytes(raw)])
    assert statuses(backend, geometry, flips) == [int(bit != 57) for bit in range(512)]


def other_headers(numel, format):
    """Headers with other formats, versions, flags and sizes, and random bytes."""
    others = [oracle.header(numel, other) for other in oracle.FORMATS if other != format]
    sizes = (0, numel - 1, numel + 1, 1024, 16384, 2 * 16384, numel + 2**32, 2**63)
    others += [oracle.header(other, format) for other in sizes if other != numel]
    code, kinds = oracle.CODES[format], [(version, 0) for version in (0, 1, 2, 3, 5, 0x104)]
    for version, flags in [*kinds, (4, 8), (4, 255)]:
        kind = payload.MAGIC, version, code, flags
        others.append(payload.HEADER.pack(*kind, numel, numel, numel, bytes(40)))
    for capacity, count in ((numel, numel - 1), (numel - 1, numel), (2**32 - 1, 2**32 - 1)):
        kind = payload.MAGIC, oracle.VERSION, code, 0
        others.append(payload.HEADER.pack(*kind, numel, capacity, count, bytes(40)))
    others += [np.random.default_rng(seed).bytes(64) for seed in range(30)]
    return [*others, bytes(64), bytes([255]) * 64, b"1TCD" + others[0][4:]]


@formats
def test_headers_of_other_payloads(backend, format):
    geometry = Geometry(1025, format, room=4096)
    (valid,) = random_payload(geometry)
    bad = [[header + valid[64:]] for header in other_headers(1025, format)]
    assert statuses(backend, geometry, bad) == [1] * len(bad)


@formats
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_only_the_range_with_the_wrong_header_is_ignored(backend, bad, format):
    """A wrong header gives the payload status 1. The status of a matrix names the range."""
    for geometry in (Geometry(32818, format, 3), Geometry(3 * 1025, format, 3, matrix=True)):
        rows = [bytearray(row) for row in random_payload(geometry)]
        rows[bad][63] = 1
        out, status = quantized_calls.dequantize_sum(backend, [list(map(bytes, rows))], geometry)
        assert status == ([[int(r == bad) for r in range(3)]] if geometry.matrix else [1])
        for r in range(3):
            low, high = geometry.bounds(r)
            assert bool(out.view(-1)[low:high].any()) == (r != bad)


def test_the_header_of_an_empty_range(backend):
    geometry = Geometry(10, "int4", ranges=2)
    rows = random_payload(geometry)
    _, status = quantized_calls.dequantize_sum(
        backend, [rows, [rows[0], bytes(geometry.nbytes)]], geometry
    )
    assert status == [0, 1]


@formats
@pytest.mark.parametrize("out_dtype", bits.FLOATS, ids=bits.name)
def test_noise_in_rows(backend, out_dtype, format):
    """All bytes of the rows are random, so some scales or values are NaN, infinite or subnormal."""
    geometry = Geometry(3000, format, ranges=2)
    rng = np.random.default_rng(0)
    for ranks in (1, 2):
        noise = []
        for _ in range(ranks):
            rows = random_payload(geometry)
            noise.append([row[:64] + rng.bytes(len(row) - 64) for row in rows])
        _, status = quantized_calls.dequantize_sum(backend, noise, geometry, out_dtype, 1 / 3)
        assert status == [0] * ranks


@pytest.mark.parametrize("format", oracle.WITH_SCALES)
def test_scales_of_every_kind(backend, format):
    """One scale per group: signed zeros, subnormal, smallest, negative, largest, infinite, NaN."""
    geometry = Geometry(1024, format)
    (valid,) = random_payload(geometry)
    kinds = [0, 0x8000, 1, 0x007F, 0x0080, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81]
    raw = valid[:-32] + np.array([*kinds, 0x3F80, 0x3F81, 0x0001, 0x8001], np.uint16).tobytes()
    out, _ = quantized_calls.dequantize_sum(backend, [[raw]], geometry)
    groups = out.view(16, 64)
    assert groups[:2].eq(0).all()
    assert groups[2].any()  # a subnormal scale is used, although no sender writes one
    assert groups[[10, 11]].isnan().all()


@pytest.mark.parametrize("format, codes", [("int8", (0xFF, 2, 0xFE)), ("int4", (0xFF, 0x22, 0xEE))])
def test_products_that_overflow(backend, format, codes):
    """The product of 2 and the largest scale overflows to infinity before it is added."""
    geometry = Geometry(1024, format)
    (valid,) = random_payload(geometry)
    scales = np.full(16, 0x7F7F, np.uint16).tobytes()
    row = len(valid) - 64 - len(scales)
    minus_1, plus_2, minus_2 = ([valid[:64] + bytes([code]) * row + scales] for code in codes)
    for ranks, expected in (
        ([minus_1, plus_2], math.inf),
        ([plus_2, minus_1], math.inf),
        ([minus_1, minus_2], -math.inf),
        ([minus_2, plus_2], math.nan),
    ):
        out, _ = quantized_calls.dequantize_sum(backend, ranks, geometry)
        assert np.array_equal(out.numpy(), np.full(1024, expected, np.float32), equal_nan=True)
