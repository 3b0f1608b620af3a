"""sample_threshold: exact k-th largest, and the published strata."""

import math

import numpy as np
import pytest
import torch
from oracle import thresholds as oracle

from conformance import bits, samples
from conformance.memory import Arena

x_dtypes = pytest.mark.parametrize("dtype", bits.FLOATS, ids=bits.name)


def check(backend, x, residual, density, segments=None, inv_scale=None, offset=0, **options):
    """Run sample_threshold, hold it against the oracle, return the thresholds."""
    segments = torch.as_tensor([0, len(x)] if segments is None else segments)
    arena = Arena(backend.device, offset)
    args = [arena.read(t) for t in (x, residual, segments)]
    result = backend.sample_threshold(*args, density, inv_scale=arena.read(inv_scale), **options)
    arena.check()
    expected = oracle.sample_threshold(
        bits.numbers(x),
        bits.numbers(residual),
        segments.tolist(),
        density,
        inv_scale=None if inv_scale is None else inv_scale.item(),
        **options,
    )
    assert result.dtype == torch.float32
    bits.assert_floats(result, expected.view(np.uint32), "threshold")
    return result.cpu()


@x_dtypes
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("numel", samples.SIZES)
def test_exact_where_every_element_is_looked_at(backend, numel, with_residual, dtype):
    x = samples.hard(numel, dtype)
    residual = samples.hard(numel, seed=1) if with_residual else None
    for density in (1e-9, 0.01, 0.5, 1.0):
        check(backend, x, residual, density)


def test_many_tie_at_a_bound_of_the_search(backend):
    """The CPU's first bound is two powers of two below the top, and it drops what is below."""
    top = np.float32(4.0).view(np.int32)
    x = torch.full([1000], 0.125)
    x[100] = 4.0
    x[300:600] = float((top + 1 - (1 << 24)).view(np.float32))
    assert check(backend, x, None, 0.2) == x[300]


@x_dtypes
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("max_samples", [1, 2, 7, 64, 2500])
def test_sampled(backend, max_samples, with_residual, dtype):
    for numel in (max_samples - 1, max_samples, max_samples + 1, 3 * max_samples + 5, 20011):
        x = samples.hard(numel, dtype)
        residual = samples.hard(numel, seed=1) if with_residual else None
        check(backend, x, residual, 0.1, max_samples=max_samples, seed=7)


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, -1])
def test_seeds_are_taken_modulo_2_32(backend, seed):
    x = samples.normal(5000)
    result = check(backend, x, None, 0.05, max_samples=100, seed=seed)
    assert result == check(backend, x, None, 0.05, max_samples=100, seed=seed % 2**32)


def test_seeds_and_segments_sample_differently(backend):
    x = samples.normal(5000).repeat(3)
    segments = [0, 5000, 10000, 15000]
    first, second = (
        check(backend, x, None, 0.05, segments, max_samples=100, seed=s) for s in (1, 2)
    )
    assert len({*first.tolist(), *second.tolist()}) == 6


@pytest.mark.many_programs
def test_a_million_elements_within_the_stated_error(backend):
    """Three standard errors of the density that 65,536 samples select."""
    x, residual = samples.normal(samples.LARGE), samples.normal(samples.LARGE, seed=1)
    tau = check(backend, x, residual, 0.01)
    density = ((x + residual).abs() >= tau).float().mean().item()
    assert abs(density / 0.01 - 1) < 3 * math.sqrt((1 - 0.01) / (65536 * 0.01))


# Pairs whose product is not what decimal notation, or float32, would make of it.
@pytest.mark.parametrize(
    ("density", "n", "k"),
    [
        *((0.07, 100, 8), (0.29, 100, 29), (0.57, 100, 57), (0.1, 10, 1), (0.3, 10, 3)),
        *((0.01, 10000, 100), (0.005, 1000, 5), (1e-300, 5, 1), (1.0, 17, 17), (1 - 1e-9, 9, 9)),
    ],
)
@pytest.mark.parametrize("extra", [0, 1])
def test_k_is_a_float64_product_rounded_up(backend, density, n, k, extra):
    """By hand: the magnitudes are 1 to n, so the k-th largest tells k."""
    x = torch.arange(1.0, n + 1).flip(0)
    assert check(backend, x, None, density) == n - k + 1
    check(backend, x.repeat(3), None, density, max_samples=n + extra)


@pytest.mark.many_programs
def test_every_round_density_of_every_length(backend):
    """One call with 400 segments: float32 products differ for half of them."""
    segments = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(1, 401).cumsum(0)])
    x = samples.patterns(int(segments[-1]))
    few = segments[:130]  # of longer ones, too, 100 are looked at
    for density in (0.01, 0.07, 0.7):
        check(backend, x, None, density, segments)
        check(backend, x[: few[-1]], None, density, few, max_samples=100)


@pytest.mark.many_launches
def test_segments(backend):
    """Empty ones give infinity and still count in the hash; none at all is legal."""
    x = samples.hard(40000)
    for count in (1, 2, 9, 300):
        segments = samples.segments(40000, count)
        check(backend, x, x.flip(0), 0.02, segments, max_samples=500, seed=3)
    result = check(backend, x, None, 0.5, [0, 0, 20, 20, 40000, 40000], max_samples=50)
    assert result.isinf().tolist() == [True, False, True, False, True]
    assert check(backend, torch.empty(0), None, 0.5, [0]).tolist() == []
    assert check(backend, torch.empty(0), torch.empty(0), 0.5).tolist() == [math.inf]


def test_nan_ranks_as_infinity(backend):
    nan, inf = math.nan, math.inf
    x = torch.tensor([1.0, nan, -inf, 2.0, -nan, 3.0])
    for k, expected in enumerate([inf, inf, inf, 3.0, 2.0, 1.0], start=1):
        assert check(backend, x, None, k / 6) == expected
    every_nan = bits.from_raw(np.array(samples.NAN_BITS, np.uint32), torch.float32)
    assert check(backend, every_nan, None, 1.0) == inf


@pytest.mark.parametrize(
    "values", [[0.0, -0.0], [1.0, -1.0, 1.0], [1e-45, -1e-45, 0.0, 3e-45], [1e-38, -1.2e-38, 1e-39]]
)
def test_ties_zeros_and_subnormals(backend, values):
    x = torch.tensor(values * 100)
    for density in (0.01, 0.3, 0.5, 0.8, 1.0):
        check(backend, x, None, density)


@pytest.mark.parametrize("inv_scale", [0.5, 2.0**-16, 3.0, 0.0, -1.0, 1e-45, math.inf, math.nan])
@x_dtypes
def test_inv_scale(backend, inv_scale, dtype):
    """Applied with a residual and without one; the product is rounded before the sum."""
    scale = torch.tensor(inv_scale)
    x, residual = samples.normal(3001, dtype), samples.normal(3001, seed=1)
    for max_samples in (1000, 65536):
        options = {"segments": [0, 1500, 3001], "max_samples": max_samples}
        check(backend, x, None, 0.1, inv_scale=scale, **options)
        check(backend, x, residual, 0.1, inv_scale=scale.reshape(1), **options)
        hard = samples.hard(3001, dtype)
        check(backend, hard, residual, 0.1, inv_scale=scale, **options)


@pytest.mark.many_programs
@pytest.mark.parametrize("inv_scale", [0.7, 1.3])
def test_the_product_is_rounded_before_the_sum(backend, inv_scale):
    """Density 1 of one element returns |acc| itself, so every rounding is seen."""
    x, residual = samples.normal(300), samples.normal(300, seed=1)
    check(backend, x, residual, 1.0, torch.arange(301), inv_scale=torch.tensor(inv_scale))


@pytest.mark.parametrize("offset", [1, 3])
@x_dtypes
def test_misaligned_views(backend, dtype, offset):
    x, residual = samples.hard(5000, dtype), samples.hard(5000, seed=1)
    check(backend, x, residual, 0.1, [0, 5, 5000], offset=offset)
    check(backend, x, None, 0.1, [0, 5, 5000], max_samples=100, offset=offset)
