"""mask_pack: capacity, and payloads of several ranges."""

import math

import numpy as np
import pytest
import torch
from oracle import payload

import dct_kernels
from conformance import bits, calls, samples

value_dtypes = pytest.mark.parametrize("value_dtype", bits.PAYLOAD_VALUES, ids=bits.name)


def spread(numel, count, seed=0):
    """[numel] of small values with `count` ones among them, and where they are."""
    where = np.sort(np.random.default_rng(seed).choice(numel, count, replace=False))
    residual = torch.full((numel,), 0.25)
    residual[torch.from_numpy(where)] = 1.0
    return residual, where


@value_dtypes
@pytest.mark.parametrize("capacity", [1, 36, 37, 38, 1000])
def test_capacity_around_the_count(backend, capacity, value_dtype):
    residual, where = spread(40000, 37)
    packed = calls.mask_pack(
        backend, residual, None, [1.0], capacity=capacity, value_dtype=value_dtype
    )
    content = packed.contents[0]
    assert content.flags == (payload.OVERFLOW if capacity < 37 else 0)
    assert content.count == min(capacity, 37)
    assert packed.seen.tolist() == [37]
    assert payload.indices(content) == where[:capacity].tolist()
    # What did not fit is late, not lost.
    late = where[capacity:]
    assert packed.residual[torch.from_numpy(late)].tolist() == [1.0] * len(late)


@value_dtypes
@pytest.mark.parametrize("short_of", [1, 50, 51, 16384])
def test_everything_passes_and_overflows(backend, short_of, value_dtype):
    numel = 2 * 16384 + 50
    residual = samples.patterns(numel)
    residual[residual == 0] = 1.0
    capacity = numel - short_of
    packed = calls.mask_pack(
        backend, residual, None, [0.0], capacity=capacity, value_dtype=value_dtype
    )
    assert packed.contents[0].starts == [0, 16384, min(32768, capacity), capacity]
    assert packed.seen.tolist() == [numel]


@pytest.mark.parametrize("value", [0.0, -0.0, 0.5])
def test_nothing_passes(backend, value):
    residual = torch.full((20000,), value)
    packed = calls.mask_pack(backend, residual, None, [1.0], capacity=10)
    content = packed.contents[0]
    assert (content.count, content.flags, content.starts) == (0, 0, [0, 0, 0])
    assert bits.raw(packed.residual).tolist() == bits.raw(residual).tolist()


def test_seen_counts_what_overflowed_per_segment(backend):
    residual = torch.ones(30000)
    packed = calls.mask_pack(backend, residual, None, [0.5, 2.0, 1.0], [0, 100, 200, 30000], 50)
    assert packed.seen.tolist() == [100, 0, 29800]
    assert packed.contents[0].positions == list(range(50))


def test_the_non_finite_flag_covers_what_did_not_fit(backend):
    residual = torch.ones(100)
    residual[99] = math.inf
    packed = calls.mask_pack(backend, residual, None, [0.5], capacity=5)
    assert packed.contents[0].flags == payload.OVERFLOW | payload.NON_FINITE
    assert packed.residual[99] == 0


@value_dtypes
@pytest.mark.parametrize("ranges", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [0, 5, 16384, 16385, 3 * 16384, 3 * 16384 + 7, 5 * 16384 + 1])
def test_ranges(backend, numel, ranges, value_dtype):
    residual, grad = samples.hard(numel), samples.hard(numel, torch.bfloat16, seed=1)
    packed = calls.mask_pack(
        backend, residual, grad, [0.75], capacity=3000, value_dtype=value_dtype, ranges=ranges
    )
    assert sum(content.numel for content in packed.contents) == numel


def test_five_ranges_of_two_blocks_three_of_them_empty(backend):
    packed = calls.mask_pack(backend, torch.ones(16385), None, [1.0], ranges=5)
    assert [content.numel for content in packed.contents] == [16384, 1, 0, 0, 0]
    assert [content.starts for content in packed.contents] == [[0, 16384], [0, 1], [0], [0], [0]]


def test_ranges_overflow_one_by_one(backend):
    """Flags and capacity are a range's own; segments run across ranges and seen counts them all."""
    numel = 4 * 16384 + 100
    residual = torch.zeros(numel)
    residual[10:15] = 1.0
    residual[40000:40006] = 1.0
    residual[numel - 1] = math.nan
    segments = [0, 12, 40003, numel]
    packed = calls.mask_pack(
        backend, residual, None, [0.5, 0.5, 0.5], segments, capacity=5, ranges=3
    )
    assert [content.flags for content in packed.contents] == [0, 1, 2]
    assert [content.count for content in packed.contents] == [5, 5, 1]
    assert [content.numel for content in packed.contents] == [32768, 32768, 100]
    assert packed.seen.tolist() == [2, 6, 4]


STATUSES = {
    "of no ranks": [],
    "sound": [0],
    "damaged": [1],
    "sound ranks": [0] * 33,
    "the first of 31": [2, *[0] * 30],
    "the last of 32": [*[0] * 31, 4],
    "the last of 33": [*[0] * 32, 7],
    "one of 1000": [*[0] * 700, 1, *[0] * 299],
    "all of 1000": [3] * 1000,
    "the sign bit": [0, -(2**31), 0],
}


@pytest.mark.parametrize("status", STATUSES.values(), ids=STATUSES)
@pytest.mark.parametrize("ranges", [1, 3])
def test_damage_of_the_last_step_is_in_every_header(backend, ranges, status):
    """Beside the flags of a range's own: the first has both others; of three the last is empty."""
    residual = torch.zeros(20000)
    residual[:6] = torch.tensor([1.0, 1, 1, 1, 1, math.nan])
    packed = calls.mask_pack(
        backend, residual, None, [0.5], capacity=5, ranges=ranges, status=status
    )
    damage = payload.DAMAGE if any(status) else 0
    flags = [content.flags for content in packed.contents]
    assert flags == [payload.OVERFLOW | payload.NON_FINITE | damage, *[damage] * (ranges - 1)]


def test_damage_of_an_empty_tensor(backend):
    packed = calls.mask_pack(backend, torch.empty(0), None, [], [0], status=[0, 1])
    assert [content.flags for content in packed.contents] == [payload.DAMAGE]


@pytest.mark.parametrize("flags", range(8))
def test_payload_info_says_the_flags(backend, flags):
    residual = torch.tensor([1.0, math.nan if flags & payload.NON_FINITE else 1.0, 1.0])
    capacity = 2 if flags & payload.OVERFLOW else 3
    status = [0, flags & payload.DAMAGE]
    packed = calls.mask_pack(backend, residual, None, [0.5], capacity=capacity, status=status)
    info = dct_kernels.payload_info(torch.frombuffer(bytearray(packed.rows[0]), dtype=torch.uint8))
    said = (info.overflow, info.non_finite, info.damage)
    assert said == (bool(flags & 1), bool(flags & 2), bool(flags & 4))


@pytest.mark.parametrize("ranges", [None, 7])
def test_many_blocks_with_overflow_in_the_middle(backend, ranges):
    numel = 12 * 16384 + 123
    residual, grad = samples.normal(numel), samples.normal(numel, torch.float16, seed=1)
    segments = samples.segments(numel, 30)
    thresholds = np.random.default_rng(0).choice([0.5, 2.0, 3.0, -1.0], 30)
    calls.mask_pack(
        backend,
        residual,
        grad,
        thresholds,
        segments,
        capacity=5003,
        value_dtype=torch.bfloat16,
        ranges=ranges,
        inv_scale=torch.tensor(0.125),
        status=[0, 0, 1],
    )


def test_a_row_of_one_range_is_the_flat_payload(backend):
    residual, grad = samples.hard(20000), samples.hard(20000, seed=1)
    flat = calls.mask_pack(backend, residual, grad, [1.0], capacity=300)
    row = calls.mask_pack(backend, residual, grad, [1.0], capacity=300, ranges=1)
    assert flat.rows == row.rows


def test_the_second_call_sends_what_the_first_could_not(backend):
    residual, where = spread(50000, 30)
    first = calls.mask_pack(backend, residual, None, [1.0], capacity=20)
    second = calls.mask_pack(backend, first.residual, None, [1.0], capacity=20)
    sent = payload.indices(first.contents[0]) + payload.indices(second.contents[0])
    assert sent == where.tolist()
    assert torch.equal(second.residual, torch.where(residual == 1.0, 0.0, residual))
