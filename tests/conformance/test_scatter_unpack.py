"""scatter_unpack of valid payloads: sum in rank order, multiply by the factor, round once."""

import math

import numpy as np
import pytest
import torch
from oracle import payload
from oracle.payload import Geometry

from conformance import bits, calls, samples

value_dtypes = pytest.mark.parametrize("value_dtype", ["float32", "bfloat16"])
out_dtypes = pytest.mark.parametrize("out_dtype", bits.FLOATS, ids=bits.name)


def payloads(geometry, ranks, density=0.02):
    pool = samples.hard(5000, getattr(torch, geometry.dtype))
    return [calls.random_payload(geometry, density, seed, pool) for seed in range(ranks)]


def entries(geometry, indices, values):
    """One rank's payload of one range with these float values (exact in the value dtype)."""
    row = bytearray([calls.PREFILL]) * geometry.nbytes
    raw = bits.raw(torch.tensor(values, dtype=getattr(torch, geometry.dtype)))
    payload.write(row, geometry, payload.content(geometry, 0, np.array(indices), raw))
    return [bytes(row)]


@value_dtypes
@out_dtypes
@pytest.mark.parametrize("numel", samples.SIZES)
def test_sizes_and_dtypes(backend, numel, out_dtype, value_dtype):
    geometry = Geometry(numel, max(1, numel // 50), value_dtype)
    calls.scatter_unpack(backend, payloads(geometry, 3), geometry, out_dtype, 0.25)


@pytest.mark.many_programs
@pytest.mark.parametrize("offset", [0, 1])
def test_output_larger_than_the_caches(backend, offset):
    """Kernels may write 34 MB of output with stores that bypass the caches."""
    geometry = Geometry(8_400_007, 5000, "bfloat16")
    calls.scatter_unpack(backend, payloads(geometry, 2, 0.0005), geometry, offset=offset)


@pytest.mark.parametrize("ranks", [0, 1, 5])
@pytest.mark.parametrize("ranges", [1, 2, 3, 7])
def test_ranks_and_ranges(backend, ranges, ranks):
    for numel in (0, 5, 16385, 5 * 16384 + 7):
        geometry = Geometry(numel, 400, "bfloat16", ranges)
        valid = payloads(geometry, ranks)
        _, status = calls.scatter_unpack(backend, valid, geometry, scale=0.125, three_dims=True)
        assert status == [0] * ranks


def test_many_ranks(backend):
    """The CPU kernel divides a tile into 128 pieces, which are fewer than the 130 ranks."""
    geometry = Geometry(5000, 100, "bfloat16")
    calls.scatter_unpack(backend, payloads(geometry, 130, 0.01), geometry, scale=1 / 130)


def test_sum_is_in_rank_order(backend):
    """In float32, 1e8 + 1 - 1e8 is 0, although another order is more accurate."""
    geometry = Geometry(6, 4, "float32")
    ranks = [
        entries(geometry, [0, 2, 3], [1e8, 1.5, -0.0]),
        entries(geometry, [0, 4], [1.0, 7.0]),
        entries(geometry, [0, 2], [-1e8, 2.0]),
    ]
    out, status = calls.scatter_unpack(backend, ranks, geometry, scale=2.0)
    assert bits.raw(out).tolist() == bits.raw(torch.tensor([0.0, 0, 7, 0, 14, 0])).tolist()
    assert status == [0, 0, 0]
    out, _ = calls.scatter_unpack(backend, ranks[::-1], geometry)
    assert out[0] == 0.0
    out, _ = calls.scatter_unpack(backend, [ranks[0], ranks[2], ranks[1]], geometry)
    assert out[0] == 1.0


def test_zeros_of_the_sum_are_positive(backend):
    """An element that no rank sent is 0.0, even with scale -1. An entry of -0.0 becomes 0.0."""
    geometry = Geometry(100, 1, "float32")
    for scale in (1.0, -1.0):
        out, _ = calls.scatter_unpack(
            backend, [entries(geometry, [5], [-0.0])], geometry, scale=scale
        )
        assert bits.raw(out).tolist() == [0] * 100


SCALES = (1 / 3, -1.0, 0.0, -0.0, 1e-45, 1e-320, 1e39, math.inf, math.nan)


@pytest.mark.parametrize("scale", SCALES)
def test_scale_is_rounded_to_float32_once(backend, scale):
    """Infinity times the 0 of an element that no rank sent is NaN."""
    geometry = Geometry(3000, 500, "float32")
    calls.scatter_unpack(backend, payloads(geometry, 3, 0.1), geometry, scale=scale)


@pytest.mark.parametrize("out_scale", [65536.0, 1 / 3, 0.0, -2.0, math.inf, math.nan])
def test_out_scale(backend, out_scale):
    """factor = float32(scale) * out_scale is rounded before the sum is multiplied by it."""
    geometry = Geometry(3000, 400, "bfloat16")
    pool, out_scale = samples.normal(3000, torch.bfloat16), torch.tensor(out_scale)
    ranks = [calls.random_payload(geometry, 0.1, seed, pool) for seed in range(3)]
    for scale, given in ((1 / 3, out_scale), (0.1, out_scale.view(1))):
        calls.scatter_unpack(backend, ranks, geometry, scale=scale, out_scale=given)


@out_dtypes
def test_out_is_rounded_once(backend, out_dtype):
    """Values include ties and subnormals. Sums overflow to infinity; only packing saturates."""
    geometry = Geometry(20000, 20000, "float32")
    for pool in (samples.hard(5000, non_finite=False), samples.patterns(5000)):
        ranks = [calls.random_payload(geometry, 1.0, 0, pool)]
        calls.scatter_unpack(backend, ranks, geometry, out_dtype)
    ranks = [entries(geometry, [0, 1, 2], [3.4028235e38, -65520.0, 65519.0])]
    out, _ = calls.scatter_unpack(backend, ranks, geometry, out_dtype)
    expected = {torch.float32: 3.4028235e38}.get(out_dtype, math.inf)
    assert out[0].item() == pytest.approx(expected)


@out_dtypes
@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_out(backend, offset, out_dtype):
    geometry = Geometry(16500, 300, "bfloat16")
    calls.scatter_unpack(backend, payloads(geometry, 2), geometry, out_dtype, 0.5, offset=offset)


@pytest.mark.parametrize("flags", range(4))
def test_non_finite_and_overflow_together_give_nan(backend, flags):
    """With both flags, the first element of the range becomes NaN, even without an entry there."""
    geometry = Geometry(40000, 50, "float32", ranges=2)
    pool = torch.tensor([1.0, 2.0])
    valid = calls.random_payload(geometry, 0.001, 0, pool)
    marked = calls.random_payload(geometry, 0.001, 1, pool, flags)
    out, status = calls.scatter_unpack(backend, [valid, [valid[0], marked[1]], valid], geometry)
    assert status == [0, 0, 0]
    expected = [32768] if flags == 3 else []
    assert out.isnan().nonzero().flatten().tolist() == expected


def test_flags_of_an_empty_range_are_ignored(backend):
    geometry = Geometry(10, 2, "float32", ranges=3)
    marked = calls.random_payload(geometry, 0.0, 0, torch.ones(1), flags=3)
    valid = calls.random_payload(geometry, 0.0, 0, torch.ones(1))
    out, status = calls.scatter_unpack(backend, [[valid[0], *marked[1:]]], geometry)
    assert status == [0]
    assert out.tolist() == [0.0] * 10
