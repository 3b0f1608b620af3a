"""track_threshold: one float32 rounding an operation."""

import itertools
import math

import numpy as np
import pytest
import torch
from oracle import thresholds as oracle

from conformance import bits, samples
from conformance.memory import Arena


def check(backend, threshold, seen, target, reference, offset=0):
    threshold, target, reference = (torch.as_tensor(t) for t in (threshold, target, reference))
    seen = torch.as_tensor(seen, dtype=torch.int32)
    arena = Arena(backend.device, offset)
    new = arena.written(threshold)
    result = backend.track_threshold(new, *(arena.read(t) for t in (seen, target, reference)))
    arena.check()
    assert result is None
    expected = oracle.track_threshold(
        *(t.numpy() for t in (threshold, seen, target, reference)),
    )
    bits.assert_floats(new, expected.view(np.uint32), "threshold", any_nan=True)
    return new.cpu()


@pytest.mark.parametrize(
    ("seen", "target", "factor"),
    [
        *((100, 100, 1.0), (0, 100, 0.95), (200, 100, 1.05), (10**6, 100, 1.25), (600, 100, 1.25)),
        *((599, 100, 1.2495), (0, 0.0, 1.0), (1, 0.0, 1.05), (0, 0.5, 0.975), (3, 0.25, 1.1375)),
    ],
)
def test_the_rule_by_hand(backend, seen, target, factor):
    """Within float32 rounding of 1 + clip(0.05 (seen - target) / max(target, 1), -0.05, 0.25)."""
    moved = check(backend, [3.0], [seen], [float(target)], [3.0])
    assert moved.item() == pytest.approx(3.0 * factor, rel=3e-7)


def test_kept_within_a_quarter_and_64_times_the_reference(backend):
    threshold, reference = [1.0, 1.0, 100.0, 100.0, 5.0], [4.0, 8.0, 1.0, 1.5, 0.0]
    moved = check(backend, threshold, [0, 0, 900, 900, 900], [100.0] * 5, reference)
    assert moved.tolist() == [1.0, 2.0, 64.0, 96.0, 0.0]


def test_negative_thresholds_stay(backend):
    threshold = [-1.0, -math.inf, -1e-45, 1.0]
    moved = check(backend, threshold, [5, 5, 5, 5], [1.0] * 4, [1.0, math.nan, 1.0, 1.0])
    assert moved[:3].tolist() == torch.tensor(threshold[:3]).tolist()
    assert moved[3] > 1.0


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 31, 32, 33, 1000])
@pytest.mark.parametrize("offset", [0, 1])
def test_sizes(backend, size, offset):
    rng = np.random.default_rng(size)
    seen = rng.integers(0, 1000, size).astype(np.int32)
    target = rng.choice([0.3, 1.0, 7.7, 250.0, 1e6], size).astype(np.float32)
    threshold, reference = (samples.normal(size, seed=s).abs() for s in (1, 2))
    check(backend, threshold, seen, target, reference, offset)


@pytest.mark.parametrize("most", [1000, 5e8])
def test_every_bit_of_many_thresholds(backend, most):
    """Each of the operations rounds, also counts above 2**24, and a fused one would show."""
    size = 20000
    rng = np.random.default_rng(0)
    target = (rng.random(size) * most).astype(np.float32)
    seen = (target * (0.5 + rng.random(size) * 3)).astype(np.int32)
    threshold = samples.normal(size).abs()
    check(backend, threshold, seen, target, threshold)


HARD = (0.0, -0.0, 1e-45, 1e-38, 1.0, 1e20, 3.4e38, math.inf, math.nan)


def test_hard_values(backend):
    """NaN is passed on from everywhere; a bound of zero gives its own sign."""
    targets = (0.0, 1.0, 1e10, math.inf, -1.0, math.nan)
    grid = itertools.product((*HARD, -1.0, -math.inf), (0, 1, 2**31 - 1), targets, (*HARD, -1.0))
    threshold, seen, target, reference = (list(column) for column in zip(*grid, strict=True))
    check(backend, threshold, seen, target, reference)
