"""dequantize_sum of valid payloads: sum in rank order, multiply by the factor, round once."""

import math

import pytest
import torch
from oracle import quantized_payload as oracle
from oracle.quantized_payload import Geometry

from conformance import bits, quantized_calls, samples
from conformance.quantized_calls import packed_values, payloads

formats = pytest.mark.parametrize("format", oracle.FORMATS)
out_dtypes = pytest.mark.parametrize("out_dtype", bits.FLOATS, ids=bits.name)

SIZES = (0, 1, 63, 64, 65, 1023, 1024, 1025, 16383, 16384, 16385)


@formats
@pytest.mark.parametrize("numel", SIZES)
def test_sizes(backend, numel, format):
    geometry = Geometry(numel, format, room=16 * (numel % 2))
    received, dtype = payloads(geometry, 2), bits.FLOATS[numel % 3]
    quantized_calls.dequantize_sum(backend, received, geometry, dtype, 0.5)


@formats
@pytest.mark.parametrize("ranges", [1, 2, 3, 7])
def test_ranges(backend, ranges, format):
    for numel in (0, 5, 16385, 2 * 16384 + 7):
        geometry = Geometry(numel, format, ranges, room=32)
        _, status = quantized_calls.dequantize_sum(
            backend, payloads(geometry, 2), geometry, three_dims=True
        )
        assert status == [0, 0]
    for n in (0, 5, 1028, 16385):  # the rows of a matrix are ranges, with or without alignment
        geometry = Geometry(ranges * n, format, ranges, room=32, matrix=True)
        dtype = bits.FLOATS[n % 3]
        _, status = quantized_calls.dequantize_sum(
            backend, payloads(geometry, 3), geometry, dtype, 0.5
        )
        assert status == [[0] * ranges] * 3


@pytest.mark.many_programs
def test_output_larger_than_the_caches(backend):
    """Kernels may write 34 MB of output with stores that bypass the caches."""
    geometry = Geometry(8_400_007, "int8")
    quantized_calls.dequantize_sum(backend, payloads(geometry, 1), geometry, scale=0.5)


@formats
def test_sum_is_in_rank_order(backend, format):
    """In float32, 2**30 + 1 - 2**30 is 0, although another order is more accurate."""
    geometry = Geometry(70, format)
    large, one, minus = (packed_values(geometry, v) for v in (2.0**30, 1.0, -(2.0**30)))
    for ranks, expected in (
        ([large, one, minus], 0.0),
        ([minus, large, one], 2.0),
        ([one, large, minus], 0.0),
    ):
        # `rel`: 1.0 is stored with a scale of 1 / 127 (int8) or 1 / 7 (int4), rounded to bfloat16.
        out, status = quantized_calls.dequantize_sum(backend, ranks, geometry, scale=2.0)
        assert out[0].item() == pytest.approx(expected, rel=0.01)
        assert out[1:].tolist() == [0.0] * 69
        assert status == [0, 0, 0]


SCALES = (1 / 3, -1.0, 0.0, -0.0, 1e-45, 1e-320, 1e39, math.inf, math.nan)


@pytest.mark.parametrize("scale", SCALES)
def test_scale_is_rounded_to_float32_once(backend, scale):
    """Every element is multiplied, even 0 by an infinite scale. No multiply-add is fused."""
    for format in ("float32", "int4"):
        geometry = Geometry(300, format)
        ranks = [packed_values(geometry, 0.0, -1.5, 3e38), packed_values(geometry, 0.0, 0.5)]
        quantized_calls.dequantize_sum(backend, ranks, geometry, scale=scale)
        geometry = Geometry(2000, format)
        quantized_calls.dequantize_sum(backend, payloads(geometry, 3), geometry, scale=scale)


@pytest.mark.parametrize("out_scale", [65536.0, 1 / 3, 0.0, -2.0, math.inf, math.nan])
def test_out_scale(backend, out_scale):
    """factor = float32(scale) * out_scale is rounded before the sum is multiplied by it."""
    geometry = Geometry(3000, "int8")
    received, out_scale = payloads(geometry, 3), torch.tensor(out_scale)
    for scale, given in ((1 / 3, out_scale), (0.1, out_scale.view(1))):
        quantized_calls.dequantize_sum(backend, received, geometry, scale=scale, out_scale=given)


@out_dtypes
def test_out_is_rounded_once(backend, out_dtype):
    """Values include ties and subnormals. Sums overflow to infinity; only packing saturates."""
    geometry = Geometry(4000, "float32")
    for values in (samples.hard(4000), samples.patterns(4000)):
        ranks = [packed_values(geometry, *values.tolist())]
        quantized_calls.dequantize_sum(backend, ranks, geometry, out_dtype)
    ranks = [packed_values(geometry, 3.4028235e38, -65520.0, 65519.0, 0.0)]
    out, _ = quantized_calls.dequantize_sum(backend, ranks, geometry, out_dtype)
    expected = {"float32": 3.4028235e38}.get(bits.name(out_dtype), math.inf)
    assert out[0].item() == pytest.approx(expected)


@out_dtypes
@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_views(backend, offset, out_dtype):
    for format in oracle.FORMATS:
        for geometry in (Geometry(2500, format), Geometry(2500, format, 4, matrix=True)):
            given = payloads(geometry, 2), geometry, out_dtype
            quantized_calls.dequantize_sum(backend, *given, 0.5, offset=offset)
