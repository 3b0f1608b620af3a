"""quantize_pack: sizes, dtypes, scales, values computed by hand, and conservation."""

import math

import numpy as np
import pytest
import torch
from oracle import payload
from oracle import quantized_payload as oracle

from conformance import bits, quantized_calls, samples
from conformance.quantized_calls import numbers

formats = pytest.mark.parametrize("format", oracle.FORMATS)
with_scales = pytest.mark.parametrize("format", oracle.WITH_SCALES)
grad_dtypes = pytest.mark.parametrize("grad_dtype", bits.FLOATS, ids=bits.name)

# Numbers of elements around groups of 64, rows of 1,024 and blocks of 16,384.
SIZES = (0, 1, 63, 64, 65, 1023, 1024, 1025, 16383, 16384, 16385)


@formats
@pytest.mark.parametrize("numel", SIZES)
def test_sizes(backend, numel, format):
    residual, grad = numbers(numel), numbers(numel, bits.FLOATS[numel % 3], seed=1)
    quantized_calls.quantize_pack(backend, residual, grad, format, room=16)


@formats
@grad_dtypes
def test_without_a_residual(backend, grad_dtype, format):
    """Nothing is added to the gradient, so -0.0 keeps its sign."""
    for numel in (0, 65, 16385):
        grad = numbers(numel, grad_dtype)
        grad[:3] = -0.0
        quantized_calls.quantize_pack(backend, None, grad, format)
        quantized_calls.quantize_pack(backend, None, grad, format, inv_scale=torch.tensor(1 / 3))


@formats
@grad_dtypes
@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_views(backend, offset, grad_dtype, format):
    residual, grad = numbers(4500), numbers(4500, grad_dtype, seed=1)
    quantized_calls.quantize_pack(backend, residual, grad, format, offset=offset)
    rows = residual.view(4, 1125), grad.view(4, 1125)  # one of four rows is aligned
    quantized_calls.quantize_pack(backend, *rows, format, offset=offset)


SCALES = (0.5, 3.0, 0.0, -1.0, 1e-45, 3e38, math.inf, math.nan)


@pytest.mark.parametrize("inv_scale", SCALES)
@grad_dtypes
def test_inv_scale(backend, inv_scale, grad_dtype):
    """The product is rounded before the sum, unlike in a fused multiply-add."""
    residual, grad = samples.normal(3011), numbers(3011, grad_dtype)
    scale = torch.tensor(inv_scale)
    for format in ("float32", "int8"):
        quantized_calls.quantize_pack(backend, residual, grad, format, inv_scale=scale)
    quantized_calls.quantize_pack(backend, residual, grad, "int4", inv_scale=scale.view(1))


# {format: (first values, bytes of their codes, bits of the scale, residual)}
BY_HAND = {
    "int8": ([127.0, 0.5, 1.5, -2.5, -126.5], [127, 0, 2, 254, 130], 0x3F80, [0, 0.5, -0.5, -0.5]),
    "int4": ([7.0, -7.0, 2.25, -0.5], [0x97, 0x02], 0x3F80, [0, 0, 0.25, -0.5]),
    # The mean magnitude is 9 / 64 over all 64 entries, and 3 over the 3 entries that are sent. The
    # first byte is 1 - 3 - 9 = 245 - 256.
    "ternary": ([4.0, -4.0, -1.0], [245, 0], 0x4040, [1, -1, 2]),
}


@pytest.mark.parametrize("format", BY_HAND)
def test_rows_by_hand(backend, format):
    """1,025 entries make two rows, each with the codes of 16 groups and then 16 scales."""
    first, codes, scale, left = BY_HAND[format]
    each = {"int8": 64, "int4": 32, "ternary": 13}[format]
    residual = torch.zeros(1025)
    for begin in (0, 64, 960):
        residual[begin : begin + len(first)] = torch.tensor(first)
    residual[1024] = first[0]
    packed = quantized_calls.quantize_pack(backend, residual, None, format)
    (raw,) = packed.rows
    assert raw[:8] == b"DCT1" + bytes([4, 0, oracle.CODES[format], 0])
    assert raw[8:64] == (1025).to_bytes(8, "little") + 2 * (1025).to_bytes(4, "little") + bytes(40)
    row = raw[64 : 64 + 16 * each + 32]
    assert row[: len(codes)] == row[each : each + len(codes)] == bytes(codes)
    assert row[2 * each : 15 * each] == bytes(13 * each)
    assert row[15 * each : 15 * each + len(codes)] == bytes(codes)
    assert np.frombuffer(row[16 * each :], np.uint16).tolist() == [scale, scale, *[0] * 13, scale]
    assert len(raw) == 64 + 2 * len(row)
    for begin in (0, 64, 960):
        assert packed.residual[begin : begin + len(left)].tolist() == left
    assert packed.residual[1024] == 0
    assert raw[64 + len(row)] == {"int8": 127, "int4": 7, "ternary": 1}[format]


def test_values_without_scales_by_hand(backend):
    """bfloat16 rounds ties to even and saturates. float32 keeps the bits unless acc is NaN."""
    acc = [0x3F808000, 0x3F818000, 0xBF808001, 0x7F7FFFFF, 0x7F800000, 0xFF812345, 0x00000001]
    residual = bits.from_raw(np.array([*acc, 0x80000000], np.uint32), torch.float32)
    packed = quantized_calls.quantize_pack(backend, residual, None, "bfloat16")
    expected = [0x3F80, 0x3F82, 0xBF81, 0x7F7F, 0x7F80, 0x7FC0, 0x0000, 0x8000]
    assert np.frombuffer(packed.rows[0][64:80], np.uint16).tolist() == expected
    left = [2.0**-8, -(2.0**-8), 2.0**-8 - 2.0**-23, 2.0**128 - 2.0**104 - 2.0**128 * 255 / 256]
    assert packed.residual.tolist() == [*left, 0.0, 0.0, 2.0**-149, 0.0]
    assert packed.flags == [payload.NON_FINITE]
    packed = quantized_calls.quantize_pack(backend, residual, None, "float32")
    assert np.frombuffer(packed.rows[0][64:96], np.uint32).tolist() == [
        *acc[:5],
        0x7FC00000,
        acc[6],
        0x80000000,
    ]
    assert packed.residual.tolist() == [0.0] * 8


@pytest.mark.many_programs
@formats
def test_conservation_over_all_exponents(backend, format):
    """Decoded value + new residual == acc, except that ternary rounds the residual once."""
    exponents = torch.arange(-149, 126, dtype=torch.float64).repeat_interleave(64)
    by_exponent = samples.normal(len(exponents)) * torch.exp2(exponents)
    acc = torch.cat([by_exponent.float(), samples.patterns(20_000)])
    packed = quantized_calls.quantize_pack(backend, acc, None, format)
    exact = acc.numpy().astype(float) - packed.values.astype(float)
    left = packed.residual.numpy()
    assert packed.flags == [0]
    assert np.isfinite(left).all()
    if format == "ternary":
        exact = exact.astype(np.float32)
    assert np.array_equal(left, exact)
    if format == "float32":
        assert not left.any()


@with_scales
def test_the_largest_numbers_stay_finite(backend, format):
    """Scales are limited so that 7 or 127 times the scale is finite."""
    top = np.array([0x7F7FFFFF, 0x7F7FFFFE, 0x7F7F8000, 0x7F7F7FFF, 0x7F400000], np.uint32)
    acc = bits.from_raw(top.repeat(64), torch.float32)
    acc[1::2] *= -1
    acc[::3] *= 0.75
    packed = quantized_calls.quantize_pack(backend, acc, None, format)
    assert packed.flags == [0]
    assert np.isfinite(packed.values).all()
    assert packed.residual.isfinite().all()
    assert np.abs(packed.values).max() > 3.38e38 or format == "ternary"


@with_scales
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_entry_makes_its_group_nan(backend, bad, format):
    """The residual of the group is unchanged, except that non-finite residuals become 0."""
    clean = quantized_calls.quantize_pack(backend, samples.normal(1500), None, format)
    for at in (0, 63, 64, 1023, 1024, 1499):
        residual, grad = samples.normal(1500), torch.zeros(1500)
        group = slice(at // 64 * 64, at // 64 * 64 + 64)
        for tensor in (residual, grad):
            poisoned = [residual.clone(), grad.clone()]
            poisoned[tensor is grad][at] = bad
            packed = quantized_calls.quantize_pack(backend, *poisoned, format)
            assert packed.flags == [payload.NON_FINITE]
            expected = clean.residual.clone()
            expected[group] = residual[group]
            if tensor is residual:
                expected[at] = 0.0
            assert torch.equal(packed.residual, expected)
            values = clean.values.copy()
            values[group] = math.nan
            assert np.array_equal(packed.values, values, equal_nan=True)
