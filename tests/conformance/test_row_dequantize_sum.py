"""row_dequantize_sum: the sum of all ranks' rows, in rank order and float32, rounded once."""

import math

import numpy as np
import pytest
import torch
from oracle import quantized_rows as oracle

from conformance import bits, samples
from conformance.memory import Arena
from conformance.test_row_dequantize import dtypes, garbage
from conformance.test_row_quantize import WIDTHS, formats

NEGATIVE_ZERO = 0x80000000


def check(backend, rows, width, format, dtype=torch.float32, offset=0):
    """Compare the op with the oracle, and return the op's result."""
    arena = Arena(backend.device, offset)
    out = backend.row_dequantize_sum(arena.read(rows), width, format, dtype)
    arena.check()
    assert out.dtype == dtype
    assert out.is_contiguous()
    expected = oracle.row_dequantize_sum(rows.numpy(), width, format, bits.name(dtype))
    bits.assert_floats(out, expected, f"sum of {format}")
    return out.cpu()


def messages(ranks, rows, width, format):
    """Return all ranks' messages: rows of random numbers with different magnitudes, and zeros."""
    x = samples.normal(ranks * rows * width).view(ranks * rows, width)
    x *= torch.tensor([1.0, 1e-3, 4096.0, 0.0, 1e30, 7.0, 1e-30]).repeat(len(x))[: len(x), None]
    raw = oracle.row_quantize(bits.numbers(x), format)
    return torch.from_numpy(raw.copy()).view(ranks, rows, raw.shape[1])


@formats
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(backend, width, format):
    check(backend, messages(3, 5, width, format), width, format, bits.FLOATS[width % 3])


@formats
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 9, 17])
def test_ranks(backend, ranks, format):
    for width, dtype in ((64, torch.float32), (20, torch.bfloat16)):
        check(backend, messages(ranks, 18, width, format), width, format, dtype)


@formats
@dtypes
@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 300])
def test_rows(backend, rows, dtype, format):
    for width in (13, 64):
        check(backend, messages(2, rows, width, format), width, format, dtype)


@formats
@pytest.mark.parametrize("width", [4096, 20000, 70001])
def test_wide_rows(backend, width, format):
    check(backend, messages(3, 2, width, format), width, format)


@formats
@dtypes
@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_views(backend, offset, dtype, format):
    for width in (64, 20):
        check(backend, messages(3, 9, width, format), width, format, dtype, offset)


@pytest.mark.many_programs
def test_input_larger_than_the_cache(backend):
    """7 input rows are repeated until the output has 34 MB. Its stores may bypass the caches."""
    for width, dtype in ((64, torch.float32), (63, torch.float32), (80, torch.bfloat16)):
        few, times = messages(2, 7, width, "sign"), math.ceil(2**25 / dtype.itemsize / width / 7)
        many = few.repeat(1, times, 1).to(backend.device)
        out = backend.row_dequantize_sum(many, width, "sign", dtype)
        expected = oracle.row_dequantize_sum(few.numpy(), width, "sign", bits.name(dtype))
        bits.assert_floats(out, np.tile(expected, (times, 1)), f"rows of {width}")


@formats
@dtypes
def test_random_bytes(backend, dtype, format):
    """Bytes are random, 0 or 255. Scales include zero, NaN and negative values."""
    for width in (1, 7, 64, 1025, 4099):
        rows = torch.stack([garbage(12, width, format, seed) for seed in range(3)])
        rows[1, 0], rows[2, 0], rows[:, 1] = 0, 255, 255
        check(backend, rows, width, format, dtype)


@formats
@dtypes
def test_scales_of_every_kind(backend, dtype, format):
    """Two ranks have the same scale and one has scale 1. A code times a large scale overflows."""
    scales = torch.arange(0, 2**16, 11 if backend.device == "cpu" else 1)
    rows = torch.full((3, len(scales), 3), 0x7E, dtype=torch.uint8)
    rows[:2, :, 1] = (scales & 255).to(torch.uint8)
    rows[:2, :, 2] = (scales >> 8).to(torch.uint8)
    rows[2, :, 1:] = torch.tensor([0x80, 0x3F], dtype=torch.uint8)
    check(backend, rows, 1, format, dtype)
    check(backend, rows.flip(0), 1, format, dtype)


def test_sum_computed_by_hand(backend):
    """The sum is in rank order and in float32: 2**30 + 1 - 2**30 is 0 and not 1."""
    large, one, minus = [1, 0x80, 0x4E], [1, 0x80, 0x3F], [0xFF, 0x80, 0x4E]
    for ranks, expected in (
        ([large, one, minus], 0.0),
        ([minus, large, one], 1.0),
        ([one, large, minus], 0.0),
    ):
        rows = torch.tensor(ranks, dtype=torch.uint8).view(3, 1, 3)
        assert check(backend, rows, 1, "int8").tolist() == [[expected]]


def test_overflowing_product_is_rounded_before_the_sum(backend):
    """5 * 2**126 overflows before it is added, although its sum with -3 * 2**126 is finite."""
    for format, minus_three in (("int8", 0xFD), ("int4", 0x0D)):
        rows = torch.tensor([[[minus_three, 0x80, 0x7E]], [[5, 0x80, 0x7E]]], dtype=torch.uint8)
        assert check(backend, rows, 1, format).tolist() == [[math.inf]]


@formats
def test_sum_of_negative_zeros_is_negative_zero(backend, format):
    """The sum is -0.0 if every rank has -0.0, which is a code of 1 with a scale of -0.0."""
    width = 40
    ones = oracle.row_quantize(bits.numbers(torch.ones(1, width)), format)
    rows = torch.from_numpy(ones.copy()).repeat(3, 1).view(3, 1, -1)
    rows[:, :, -2], rows[:, :, -1] = 0x00, 0x80
    assert (bits.raw(check(backend, rows, width, format)) == NEGATIVE_ZERO).all()
    assert (bits.raw(check(backend, rows[:1], width, format)) == NEGATIVE_ZERO).all()
    rows[1, :, -1] = 0x00
    assert (bits.raw(check(backend, rows, width, format)) == 0).all()
