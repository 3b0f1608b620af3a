"""mask_pack on values, sizes, dtypes and thresholds; ranges and capacity are in test_overflow."""

import math

import numpy as np
import pytest
import torch
from oracle import floats, payload

from conformance import bits, calls, samples

NO_GRAD_AND_FLOATS = (None, *bits.FLOATS)
grad_dtypes = pytest.mark.parametrize("grad_dtype", NO_GRAD_AND_FLOATS, ids=lambda d: bits.name(d))
value_dtypes = pytest.mark.parametrize("value_dtype", bits.PAYLOAD_VALUES, ids=bits.name)

HARD_THRESHOLDS = (0.0, -0.0, 1e-40, 0.5, 1.0, 3e38, math.inf, math.nan, -1.0, -math.inf, -1e-45)


def hard_grad(numel, dtype, seed=1):
    return None if dtype is None else samples.hard(numel, dtype, seed)


@value_dtypes
@grad_dtypes
@pytest.mark.parametrize("numel", samples.SIZES)
def test_sizes_and_dtypes(backend, numel, grad_dtype, value_dtype):
    residual, grad = samples.hard(numel), hard_grad(numel, grad_dtype)
    calls.mask_pack(backend, residual, grad, [1.0], value_dtype=value_dtype)


@pytest.mark.many_programs
@value_dtypes
@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16], ids=lambda d: bits.name(d))
def test_a_million_elements(backend, grad_dtype, value_dtype):
    residual, grad = samples.normal(samples.LARGE), hard_grad(samples.LARGE, grad_dtype)
    capacity = samples.LARGE // 2
    calls.mask_pack(backend, residual, grad, [2.5], capacity=capacity, value_dtype=value_dtype)


@grad_dtypes
@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_views(backend, offset, grad_dtype):
    residual, grad = samples.hard(16500), hard_grad(16500, grad_dtype)
    calls.mask_pack(backend, residual, grad, [0.5], capacity=4000, offset=offset)


@value_dtypes
def test_the_comparison_by_hand(backend, value_dtype):
    """Equal to the threshold passes, zeros never do, NaN and infinity always do."""
    nan, inf, below = math.nan, math.inf, np.nextafter(np.float32(2), np.float32(0))
    residual = torch.tensor([2.0, -2.0, below, -0.0, 0.0, nan, -inf, 1e-45, 3.0])
    packed = calls.mask_pack(backend, residual, None, [2.0], value_dtype=value_dtype)
    content = packed.contents[0]
    assert packed.seen.tolist() == [5]
    assert content.positions == [0, 1, 5, 6, 8]
    assert floats.widen(content.values, bits.name(value_dtype)).tolist()[:2] == [2.0, -2.0]
    assert content.flags == payload.NON_FINITE
    assert content.starts == [0, 5]
    expected = torch.tensor([0.0, 0.0, below, -0.0, 0.0, 0.0, 0.0, 1e-45, 0.0])
    assert bits.raw(packed.residual).tolist() == bits.raw(expected).tolist()


@value_dtypes
@grad_dtypes
def test_hard_thresholds(backend, grad_dtype, value_dtype):
    """One segment for each, of lengths that no vector divides; a negative one is not even read."""
    bounds = [0]
    for s in range(len(HARD_THRESHOLDS)):
        bounds.append(bounds[-1] + 1501 + 37 * s)
    residual, grad = samples.hard(bounds[-1]), hard_grad(bounds[-1], grad_dtype)
    packed = calls.mask_pack(
        backend, residual, grad, HARD_THRESHOLDS, bounds, value_dtype=value_dtype
    )
    skipped = [s for s, tau in enumerate(HARD_THRESHOLDS) if tau < 0]
    assert [packed.seen[s].item() for s in skipped] == [0, 0, 0]
    assert min(packed.seen[s].item() for s in range(6)) > 0
    for s in skipped:
        part = slice(bounds[s], bounds[s + 1])
        assert bits.raw(packed.residual[part]).tolist() == bits.raw(residual[part]).tolist()


def test_threshold_infinity_lets_infinity_pass(backend):
    residual = torch.tensor([3.4e38, math.inf, math.nan, 1.0])
    packed = calls.mask_pack(backend, residual, None, [math.inf])
    assert packed.contents[0].positions == [1, 2]


def test_non_finite_values_in_a_skipped_segment_raise_no_flag(backend):
    residual = torch.tensor([math.nan, 1.0, math.inf, 2.0])
    packed = calls.mask_pack(backend, residual, None, [-1.0, 1.5], [0, 3, 4])
    assert packed.contents[0].flags == 0
    assert packed.contents[0].positions == [3]
    assert packed.seen.tolist() == [0, 1]


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
@pytest.mark.parametrize("numel", [5, 3000, 2 * 16384 + 9])
def test_many_segments_some_of_them_empty(backend, numel, count):
    thresholds = np.random.default_rng(count).choice([0.0, 0.5, 2.0, math.inf, -1.0], count)
    segments = samples.segments(numel, count)
    grad = samples.hard(numel, seed=1)
    calls.mask_pack(backend, samples.hard(numel), grad, thresholds, segments, capacity=1000)


def test_only_empty_segments_and_none(backend):
    empty = torch.empty(0)
    assert calls.mask_pack(backend, empty, empty, [1.0, -1.0], [0, 0, 0]).seen.tolist() == [0, 0]
    assert calls.mask_pack(backend, empty, None, [], [0]).seen.tolist() == []


def test_empty_segments_at_both_ends_and_between(backend):
    residual = torch.tensor([1.0, 5.0, 5.0, 1.0])
    packed = calls.mask_pack(backend, residual, None, [9, 2, 9, 3, 9], [0, 0, 2, 2, 4, 4])
    assert packed.seen.tolist() == [0, 1, 0, 1, 0]
    assert packed.contents[0].positions == [1, 2]


SCALES = (1.0, 0.5, 2.0**-16, 3.0, 0.0, -0.0, -1.0, 1e-45, 3e38, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("inv_scale", SCALES)
@pytest.mark.parametrize("grad_dtype", bits.FLOATS, ids=bits.name)
def test_inv_scale(backend, inv_scale, grad_dtype):
    """The product is rounded before the sum: a fused multiply-add would differ here."""
    residual, grad = samples.normal(20011), samples.normal(20011, grad_dtype, seed=1)
    scale = torch.tensor(inv_scale)
    calls.mask_pack(backend, residual, grad, [1.0], inv_scale=scale)
    hard = samples.hard(1000, grad_dtype, seed=2)
    calls.mask_pack(backend, residual[:1000], hard, [1.0], inv_scale=scale.reshape(1))


def test_inv_scale_is_unused_without_a_gradient(backend):
    calls.mask_pack(backend, samples.hard(100), None, [1.0], inv_scale=torch.tensor(math.nan))


@pytest.mark.many_programs
@value_dtypes
@pytest.mark.parametrize("threshold", [0.0, math.nan], ids=str)
def test_conservation_over_all_exponents(backend, value_dtype, threshold):
    """packed value + new residual == acc for every finite acc: in float32, and exactly."""
    acc = samples.patterns(400_000)
    packed = calls.mask_pack(backend, acc, None, [threshold], value_dtype=value_dtype)
    content = packed.contents[0]
    assert content.count == np.count_nonzero(acc.numpy())
    values = np.zeros(len(acc), np.float32)
    values[payload.indices(content)] = floats.widen(content.values, bits.name(value_dtype))
    left = packed.residual.numpy()
    assert np.array_equal(values + left, acc.numpy())
    assert np.array_equal(values.astype(float) + left.astype(float), acc.numpy().astype(float))
    assert np.isfinite(values).all()


def test_an_overflowed_step_destroys_no_residual(backend):
    """An fp16 loss scale that overflows: the gradient is inf or NaN nearly everywhere."""
    residual = samples.normal(20000)
    grad = torch.full((20000,), math.inf, dtype=torch.float16)
    grad[::3] = math.nan
    packed = calls.mask_pack(backend, residual, grad, [1.0], capacity=100)
    assert torch.equal(packed.residual, residual)
    assert packed.contents[0].flags == payload.OVERFLOW | payload.NON_FINITE
    assert packed.contents[0].count == 100


def test_a_residual_that_is_not_finite_recovers(backend):
    """It becomes 0 as soon as its segment is active, packed or not."""
    residual = torch.tensor([math.nan, math.inf, -math.inf, 1.0, math.nan])
    packed = calls.mask_pack(backend, residual, torch.zeros(5), [0.5], capacity=2)
    assert bits.raw(packed.residual).tolist() == bits.raw(torch.tensor([0.0, 0, 0, 1, 0])).tolist()


def test_packed_values_by_hand(backend):
    """bfloat16: ties to even, saturation, the one NaN; float32: the bits of acc."""
    inf, nan = 0x7F800000, 0xFF812345
    acc = [0x3F808000, 0x3F818000, 0xBF808001, 0x7F7FFFFF, 0xFF7F8000, inf, nan, 0x00000001]
    residual = bits.from_raw(np.array(acc, np.uint32), torch.float32)
    packed = calls.mask_pack(backend, residual, None, [0.0], value_dtype=torch.bfloat16)
    expected = [0x3F80, 0x3F82, 0xBF81, 0x7F7F, 0xFF7F, 0x7F80, 0x7FC0, 0x0000]
    assert packed.contents[0].values == expected
    packed = calls.mask_pack(backend, residual, None, [0.0], value_dtype=torch.float32)
    assert packed.contents[0].values == [*acc[:6], 0x7FC00000, 0x00000001]
