"""mask_pack: the capacity, and payloads of several ranges."""

import math

import numpy as np
import pytest
import torch
from oracle import payload

from conformance import bits, calls, samples

value_dtypes = pytest.mark.parametrize("value_dtype", bits.PAYLOAD_VALUES, ids=bits.name)


def spread(numel, count):
    """([numel] values of 0.25 with `count` ones among them, the positions of the ones)."""
    where = np.sort(np.random.default_rng(0).choice(numel, count, replace=False))
    residual = torch.full((numel,), 0.25)
    residual[torch.from_numpy(where)] = 1.0
    return residual, where


@pytest.mark.parametrize("capacity", [1, 36, 37, 38, 1000])
def test_capacity_around_the_count(backend, capacity):
    residual, where = spread(40000, 37)
    packed = calls.mask_pack(backend, residual, None, 1.0, capacity)
    content = packed.contents[0]
    assert content.flags == (payload.OVERFLOW if capacity < 37 else 0)
    assert content.count == min(capacity, 37)
    assert packed.seen.tolist() == [37]
    assert payload.indices(content) == where[:capacity].tolist()
    # Entries beyond the capacity stay in the residual.
    remaining = where[capacity:]
    assert packed.residual[torch.from_numpy(remaining)].tolist() == [1.0] * len(remaining)


@value_dtypes
@pytest.mark.parametrize("short_of", [1, 50, 51, 16384])
def test_overflow_when_all_entries_pass(backend, short_of, value_dtype):
    numel = 2 * 16384 + 50
    residual = samples.patterns(numel)
    residual[residual == 0] = 1.0
    capacity = numel - short_of
    packed = calls.mask_pack(backend, residual, None, 0.0, capacity, value_dtype)
    assert packed.contents[0].starts == [0, 16384, min(32768, capacity), capacity]
    assert packed.seen.tolist() == [numel]


def test_the_non_finite_flag_covers_entries_beyond_the_capacity(backend):
    residual = torch.ones(100)
    residual[99] = math.inf
    packed = calls.mask_pack(backend, residual, None, 0.5, capacity=5)
    assert packed.contents[0].flags == payload.OVERFLOW | payload.NON_FINITE
    assert packed.residual[99] == 0


@pytest.mark.parametrize("ranges", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [0, 5, 16385, 3 * 16384, 3 * 16384 + 7, 5 * 16384 + 1])
def test_ranges(backend, numel, ranges):
    """Each range has its own threshold. The last ranges may be short or empty."""
    residual, grad = samples.hard(numel), samples.hard(numel, torch.bfloat16, seed=1)
    thresholds = [0.75, -1.0, math.inf, 2.0, math.nan, 0.0, 0.5][:ranges]
    value_dtype = bits.PAYLOAD_VALUES[ranges % 2]
    packed = calls.mask_pack(backend, residual, grad, thresholds, 3000, value_dtype, ranges)
    assert sum(content.numel for content in packed.contents) == numel


@pytest.mark.parametrize("ranges", [None, 7])
def test_many_blocks_with_overflow_in_the_middle(backend, ranges):
    numel = 12 * 16384 + 123
    residual, grad = samples.normal(numel), samples.normal(numel, torch.float16, seed=1)
    thresholds = 2.0 if ranges is None else [0.5, 2.0, 3.0, 2.5, 1.0, 2.0, 0.5]
    scale = torch.tensor(0.125)
    calls.mask_pack(
        backend, residual, grad, thresholds, 5003, torch.bfloat16, ranges, inv_scale=scale
    )
