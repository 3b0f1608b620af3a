"""quantize_pack into several ranges, and into payloads that are longer than needed."""

import math

import pytest
import torch
from oracle import payload
from oracle import quantized_payload as oracle
from oracle.quantized_payload import Geometry

import dct_kernels
from conformance import quantized_calls
from conformance.quantized_calls import numbers

formats = pytest.mark.parametrize("format", oracle.FORMATS)


@formats
@pytest.mark.parametrize("ranges", [1, 2, 3, 7])
def test_ranges(backend, ranges, format):
    """Bytes after the rows are unchanged, even if the last range is shorter or a range is empty."""
    for numel in (0, 5, 16384, 16385, 2 * 16384 + 7):
        residual, grad = numbers(numel), numbers(numel, torch.bfloat16, seed=1)
        packed = quantized_calls.quantize_pack(backend, residual, grad, format, ranges, room=32)
        assert sum(int.from_bytes(row[8:16], "little") for row in packed.rows) == numel
    for n in (0, 5, 1028, 16385):  # the rows of a matrix are ranges, with or without alignment
        residual, grad = (numbers(ranges * n, seed=s).view(ranges, n) for s in (0, 1))
        packed = quantized_calls.quantize_pack(backend, residual, grad, format, room=32)
        assert [int.from_bytes(row[8:16], "little") for row in packed.rows] == [n] * ranges


@formats
def test_each_range_has_its_own_non_finite_flag(backend, format):
    residual = torch.ones(2 * 16384 + 100)
    residual[-1] = math.nan
    packed = quantized_calls.quantize_pack(backend, residual, None, format, ranges=3)
    assert packed.flags == [0, 0, payload.NON_FINITE]
    rows = residual.view(4, -1)
    assert quantized_calls.quantize_pack(backend, rows, None, format).flags == [0, 0, 0, 2]


@formats
def test_quantized_payload_bytes_match_the_oracle(format):
    for ranges in (1, 2, 3, 5):
        for numel in (0, 1, 1024, 1025, 16384, 16385, 10**6 + 3, 2**31 + 16385, 2**40):
            expected = Geometry(numel, format, ranges).nbytes
            assert dct_kernels.quantized_payload_bytes(numel, format, ranges) == expected
            assert expected % 16 == 0


def test_quantized_payload_bytes_by_hand():
    sizes = [dct_kernels.quantized_payload_bytes(1025, format) for format in oracle.FORMATS]
    assert sizes == [64 + 2 * row for row in (4096, 2048, 64 * 16 + 32, 32 * 16 + 32, 13 * 16 + 32)]
    # Two blocks and one entry, in two ranges: the first range has two blocks of 16 rows.
    assert dct_kernels.quantized_payload_bytes(2 * 16384 + 1, "int4", 2) == 64 + 32 * 544
    assert dct_kernels.quantized_payload_bytes(0, "int8", 7) == 64
