"""dequantize_sum_pack equals dequantize_sum followed by quantize_pack, bit for bit.

test_dequantize_sum.py covers sizes, scales and alignments.
"""

import pytest
import torch
from oracle import quantized_payload as oracle
from oracle.quantized_payload import Geometry

from conformance import quantized_calls, samples
from conformance.quantized_calls import packed_values, payloads

formats = pytest.mark.parametrize("format", oracle.FORMATS)


@formats
@pytest.mark.parametrize("ranks", [0, 1, 64])
def test_equals_the_two_ops_in_sequence(backend, ranks, format):
    geometry = Geometry(1500, format)
    inputs, residual = payloads(geometry, ranks), samples.normal(1500)
    scale = 1 / max(ranks, 1)
    fused, status = quantized_calls.dequantize_sum_pack(backend, inputs, geometry, residual, scale)
    assert status == [0] * ranks
    out, _ = quantized_calls.dequantize_sum(backend, inputs, geometry, scale=scale)
    separate = quantized_calls.quantize_pack(backend, residual, out, format)
    assert fused.rows == separate.rows
    assert torch.equal(fused.residual, separate.residual)


@formats
def test_mean_plus_residual_by_hand(backend, format):
    """The owner adds its residual to the mean of two ranks. The sum is exact in all formats."""
    geometry = Geometry(1030, format)
    unit = 127.0 if format == "int8" else 7.0
    residual = torch.zeros(1030)
    residual[0], residual[1029] = unit, -unit
    ranks = [packed_values(geometry, 2 * unit), packed_values(geometry, 4 * unit)]
    packed, status = quantized_calls.dequantize_sum_pack(backend, ranks, geometry, residual, 0.5)
    assert packed.values.tolist() == [4 * unit, *[0.0] * 1028, -unit]
    assert packed.residual.tolist() == [0.0] * 1030
    assert (packed.flags, status) == ([0], [0, 0])


def test_a_payload_without_a_header_adds_nothing(backend):
    """The other payloads are added. The error is in `status`, but not in the packed flags."""
    geometry = Geometry(100, "int8")
    first, second = packed_values(geometry, 127.0), packed_values(geometry, 254.0)
    empty = [bytes(geometry.nbytes)]
    packed, status = quantized_calls.dequantize_sum_pack(
        backend, [first, empty, second], geometry, torch.zeros(100)
    )
    assert status == [0, 1, 0]
    assert packed.flags == [0]
    assert packed.values[0] + packed.residual[0].item() == 381.0
