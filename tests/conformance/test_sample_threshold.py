"""sample_threshold: the exact k-th largest, and samples from the published strata."""

import math

import numpy as np
import pytest
import torch
from oracle import payload

from conformance import bits, samples
from conformance.calls import sample_threshold as check

grad_dtypes = pytest.mark.parametrize("dtype", bits.FLOATS, ids=bits.name)


@grad_dtypes
@pytest.mark.parametrize("numel", samples.SIZES)
def test_exact_if_all_elements_are_sampled(backend, numel, dtype):
    grad, residual = samples.hard(numel, dtype), samples.hard(numel, seed=1)
    for density in (1e-9, 0.01, 0.5, 1.0):
        check(backend, grad, residual, density)


def test_ties_of_the_k_th_largest(backend):
    """300 entries tie. The CPU kernel searches for the k-th largest magnitude bit by bit."""
    top = np.float32(4.0).view(np.int32)
    x = torch.full([1000], 0.125)
    x[100] = 4.0
    x[300:600] = float((top + 1 - (1 << 24)).view(np.float32))
    assert check(backend, x, None, 0.2) == x[300]


@grad_dtypes
@pytest.mark.parametrize("max_samples", [1, 2, 7, 64, 2500])
def test_sampling(backend, max_samples, dtype):
    for numel in (max_samples - 1, max_samples, max_samples + 1, 3 * max_samples + 5, 20011):
        grad, residual = samples.hard(numel, dtype), samples.hard(numel, seed=1)
        check(backend, grad, residual, 0.1, max_samples=max_samples, seed=7)


@pytest.mark.parametrize("seed", [0, 12345, 2**31, 2**32 - 1, 2**32 + 1, 2**63 - 1, -1])
def test_seeds_are_taken_modulo_2_32(backend, seed):
    x = samples.normal(5000)
    result = check(backend, x, None, 0.05, max_samples=100, seed=seed)
    assert result == check(backend, x, None, 0.05, max_samples=100, seed=seed % 2**32)


def test_seeds_and_ranges_sample_differently(backend):
    x = samples.normal(16384).repeat(3)
    first, second = (check(backend, x, None, 0.05, 3, max_samples=100, seed=s) for s in (1, 2))
    assert len({*first.tolist(), *second.tolist()}) == 6


@pytest.mark.many_programs
def test_density_of_a_million_elements_is_within_the_stated_error(backend):
    """The limit is three standard errors of the density with 65,536 samples."""
    grad, residual = samples.normal(samples.LARGE), samples.normal(samples.LARGE, seed=1)
    tau = check(backend, grad, residual, 0.01)
    density = ((grad + residual).abs() >= tau).float().mean().item()
    assert abs(density / 0.01 - 1) < 3 * math.sqrt((1 - 0.01) / (65536 * 0.01))


# Some of these float64 products round up to a different k than decimal or float32 products do.
@pytest.mark.parametrize(
    ("density", "n", "k"),
    [
        *((0.07, 100, 8), (0.29, 100, 29), (0.57, 100, 57), (0.1, 10, 1), (0.3, 10, 3)),
        *((0.01, 10000, 100), (0.005, 1000, 5), (1e-300, 5, 1), (1.0, 17, 17), (1 - 1e-9, 9, 9)),
    ],
)
def test_k_is_a_float64_product_rounded_up(backend, density, n, k):
    """The magnitudes are 1 to n, so the threshold determines k."""
    x = torch.arange(1.0, n + 1).flip(0)
    assert check(backend, x, None, density) == n - k + 1
    for max_samples in (n, n + 1):
        check(backend, x.repeat(3), None, density, max_samples=max_samples)


@pytest.mark.parametrize("ranges", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [0, 5, 16385, 3 * 16384, 5 * 16384 + 1])
def test_ranges(backend, numel, ranges):
    """Ranges of more than 500 elements are sampled. The threshold of an empty range is infinity."""
    x = samples.hard(numel)
    result = check(backend, x, x.flip(0), 0.02, ranges, max_samples=500, seed=3)
    check(backend, x, x.flip(0), 0.5, ranges)
    bounds = [payload.bounds(numel, ranges, r) for r in range(ranges)]
    assert result[[low == high for low, high in bounds]].eq(math.inf).all()


def test_nan_ranks_as_infinity(backend):
    nan, inf = math.nan, math.inf
    x = torch.tensor([1.0, nan, -inf, 2.0, -nan, 3.0])
    for k, expected in enumerate([inf, inf, inf, 3.0, 2.0, 1.0], start=1):
        assert check(backend, x, None, k / 6) == expected
    every_nan = bits.from_raw(np.array(samples.NAN_BITS, np.uint32), torch.float32)
    assert check(backend, every_nan, None, 1.0) == inf


@pytest.mark.parametrize("inv_scale", [0.5, 3.0, 0.0, -1.0, 1e-45, math.inf, math.nan])
@grad_dtypes
def test_inv_scale(backend, inv_scale, dtype):
    scale = torch.tensor(inv_scale)
    residual = samples.normal(3001, seed=1)
    for grad in (samples.normal(3001, dtype), samples.hard(3001, dtype)):
        check(backend, grad, residual, 0.1, inv_scale=scale)
        check(backend, grad, residual, 0.1, max_samples=1000, inv_scale=scale.reshape(1))


def test_the_product_is_rounded_before_the_sum(backend):
    """With one sample and density 1 the result is |acc|, which shows every rounding."""
    numel, scale = 7 * 16384, torch.tensor(0.7)
    grad, residual = samples.normal(numel), samples.normal(numel, seed=1)
    for seed in range(4):
        check(backend, grad, residual, 1.0, 7, scale, max_samples=1, seed=seed)


@pytest.mark.parametrize("offset", [1, 3])
@grad_dtypes
def test_misaligned_views(backend, dtype, offset):
    grad, residual = samples.hard(17000, dtype), samples.hard(17000, seed=1)
    check(backend, grad, residual, 0.1, 2, offset=offset)
    check(backend, grad, residual, 0.1, 2, max_samples=100, offset=offset)
