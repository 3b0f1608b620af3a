"""dequantize_sum_pack: dequantize_sum and then quantize_pack of what it wrote, bit for bit.

Sizes, scales and alignments are in test_dequantize_sum.
"""

import pytest
import torch
from oracle import quantized_payload as oracle
from oracle.quantized_payload import Geometry

from conformance import quantized_calls, samples
from conformance.quantized_calls import of_values, payloads

formats = pytest.mark.parametrize("format", oracle.FORMATS)


@formats
@pytest.mark.parametrize("ranks", [0, 1, 64])
def test_ranks_and_the_two_ops_one_after_the_other(backend, ranks, format):
    geometry = Geometry(1500, format)
    of_all, residual = payloads(geometry, ranks), samples.normal(1500)
    scale = 1 / max(ranks, 1)
    fused, status = quantized_calls.dequantize_sum_pack(backend, of_all, geometry, residual, scale)
    assert status == [0] * ranks
    out, _ = quantized_calls.dequantize_sum(backend, of_all, geometry, scale=scale)
    separate = quantized_calls.quantize_pack(backend, residual, out, format)
    assert fused.rows == separate.rows
    assert torch.equal(fused.residual, separate.residual)


@formats
def test_the_owner_by_hand(backend, format):
    """The mean of two ranks and what the owner had kept go out, all in whole steps of a scale."""
    geometry = Geometry(1030, format)
    unit = 127.0 if format == "int8" else 7.0
    kept = torch.zeros(1030)
    kept[0], kept[1029] = unit, -unit
    ranks = [of_values(geometry, 2 * unit), of_values(geometry, 4 * unit)]
    packed, status = quantized_calls.dequantize_sum_pack(backend, ranks, geometry, kept, 0.5)
    assert packed.values.tolist() == [4 * unit, *[0.0] * 1028, -unit]
    assert packed.residual.tolist() == [0.0] * 1030
    assert (packed.flags, status) == ([0], [0, 0])


def test_a_payload_without_a_header_adds_nothing(backend):
    """The others do, and the owner's payload says no damage: who reads `status` knows."""
    geometry = Geometry(100, "int8")
    first, second = of_values(geometry, 127.0), of_values(geometry, 254.0)
    empty = [bytes(geometry.nbytes)]
    packed, status = quantized_calls.dequantize_sum_pack(
        backend, [first, empty, second], geometry, torch.zeros(100)
    )
    assert status == [0, 1, 0]
    assert packed.flags == [0]
    assert packed.values[0] + packed.residual[0].item() == 381.0
