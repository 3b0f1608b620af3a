"""mask_pack: values, sizes, dtypes and thresholds. test_overflow.py tests capacity and ranges."""

import math

import numpy as np
import pytest
import torch
from oracle import floats, payload

from conformance import bits, calls, samples

grad_dtypes = pytest.mark.parametrize("grad_dtype", bits.FLOATS, ids=bits.name)
value_dtypes = pytest.mark.parametrize("value_dtype", bits.PAYLOAD_VALUES, ids=bits.name)


@grad_dtypes
@pytest.mark.parametrize("numel", samples.SIZES)
def test_sizes(backend, numel, grad_dtype):
    residual, grad = samples.hard(numel), samples.hard(numel, grad_dtype, seed=1)
    calls.mask_pack(backend, residual, grad, 1.0, value_dtype=bits.PAYLOAD_VALUES[numel % 2])


@pytest.mark.many_programs
@value_dtypes
def test_a_million_elements(backend, value_dtype):
    residual = samples.normal(samples.LARGE)
    grad = samples.hard(samples.LARGE, torch.bfloat16, seed=1)
    capacity = samples.LARGE // 2
    calls.mask_pack(backend, residual, grad, 2.5, capacity=capacity, value_dtype=value_dtype)


@grad_dtypes
@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_views(backend, offset, grad_dtype):
    residual, grad = samples.hard(16500), samples.hard(16500, grad_dtype, seed=1)
    calls.mask_pack(backend, residual, grad, 0.5, capacity=4000, offset=offset)


@value_dtypes
def test_comparison_with_the_threshold_by_hand(backend, value_dtype):
    """An entry equal to the threshold passes. Zeros never pass. NaN and infinity always pass.

    If the threshold is 0, negative or NaN, all nonzero entries pass.
    """
    nan, inf, below = math.nan, math.inf, np.nextafter(np.float32(2), np.float32(0))
    residual = torch.tensor([2.0, -2.0, below, -0.0, 0.0, nan, -inf, 1e-45, 3.0])
    expected = {2.0: [0, 1, 5, 6, 8], 3.0: [5, 6, 8], inf: [5, 6], 1e-44: [0, 1, 2, 5, 6, 8]}
    for threshold in (1e-45, 0.0, -1.0, -1e-45, -inf, nan):
        expected[threshold] = [0, 1, 2, 5, 6, 7, 8]
    for threshold, positions in expected.items():
        packed = calls.mask_pack(backend, residual, None, threshold, value_dtype=value_dtype)
        content = packed.contents[0]
        assert content.positions == positions
        assert packed.seen.tolist() == [len(positions)]
        assert content.starts == [0, len(positions)]
        assert content.flags == payload.NON_FINITE
    packed = calls.mask_pack(backend, residual, None, 2.0, value_dtype=value_dtype)
    sent = floats.widen(packed.contents[0].values, bits.name(value_dtype)).tolist()
    assert sent[:2] == [2.0, -2.0]
    kept = torch.tensor([0.0, 0.0, below, -0.0, 0.0, 0.0, 0.0, 1e-45, 0.0])
    assert bits.raw(packed.residual).tolist() == bits.raw(kept).tolist()


SCALES = (0.5, 3.0, 0.0, -1.0, 1e-45, 3e38, math.inf, math.nan)


@pytest.mark.parametrize("inv_scale", SCALES)
@grad_dtypes
def test_inv_scale(backend, inv_scale, grad_dtype):
    """The product is rounded before the sum, unlike in a fused multiply-add."""
    residual, grad = samples.normal(5011), samples.normal(5011, grad_dtype, seed=1)
    scale = torch.tensor(inv_scale)
    calls.mask_pack(backend, residual, grad, 1.0, inv_scale=scale)
    hard = samples.hard(1000, grad_dtype, seed=2)
    calls.mask_pack(backend, residual[:1000], hard, 1.0, inv_scale=scale.reshape(1))


@pytest.mark.many_programs
@value_dtypes
def test_conservation_over_all_exponents(backend, value_dtype):
    """Packed value + new residual == acc for all finite acc, in float32 and in exact arithmetic."""
    acc = samples.patterns(100_000)
    packed = calls.mask_pack(backend, acc, None, 0.0, value_dtype=value_dtype)
    content = packed.contents[0]
    assert content.count == np.count_nonzero(acc.numpy())
    values = np.zeros(len(acc), np.float32)
    values[payload.indices(content)] = floats.widen(content.values, bits.name(value_dtype))
    left = packed.residual.numpy()
    assert np.array_equal(values + left, acc.numpy())
    assert np.array_equal(values.astype(float) + left.astype(float), acc.numpy().astype(float))
    assert np.isfinite(values).all()


def test_a_non_finite_gradient_leaves_the_residual_unchanged(backend):
    """If a scaled fp16 loss overflows, all entries of the gradient may be inf or NaN."""
    residual = samples.normal(20000)
    grad = torch.full((20000,), math.inf, dtype=torch.float16)
    grad[::3] = math.nan
    packed = calls.mask_pack(backend, residual, grad, 1.0, capacity=100)
    assert torch.equal(packed.residual, residual)
    assert packed.contents[0].flags == payload.OVERFLOW | payload.NON_FINITE
    assert packed.contents[0].count == 100


def test_packed_values_by_hand(backend):
    """bfloat16 rounds ties to even and saturates. float32 keeps the bits unless acc is NaN."""
    inf, nan = 0x7F800000, 0xFF812345
    acc = [0x3F808000, 0x3F818000, 0xBF808001, 0x7F7FFFFF, 0xFF7F8000, inf, nan, 0x00000001]
    residual = bits.from_raw(np.array(acc, np.uint32), torch.float32)
    packed = calls.mask_pack(backend, residual, None, 0.0, value_dtype=torch.bfloat16)
    expected = [0x3F80, 0x3F82, 0xBF81, 0x7F7F, 0xFF7F, 0x7F80, 0x7FC0, 0x0000]
    assert packed.contents[0].values == expected
    packed = calls.mask_pack(backend, residual, None, 0.0, value_dtype=torch.float32)
    assert packed.contents[0].values == [*acc[:6], 0x7FC00000, 0x00000001]
