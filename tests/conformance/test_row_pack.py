"""row_pack, row_gather and row_unpack: selected entries, encodings, rounding."""

import math

import numpy as np
import pytest
import torch
from oracle import rows as oracle

from conformance import bits, samples
from conformance.memory import Arena

x_dtypes = pytest.mark.parametrize("dtype", bits.FLOATS, ids=bits.name)
value_dtypes = pytest.mark.parametrize("value_dtype", bits.FLOATS, ids=bits.name)

# (width, k) around multiples of bytes and vectors, and where the encoding changes.
SHAPES = [(1, 1), (2, 1), (7, 7), (8, 1), (9, 2), (31, 3), (32, 4), (33, 5), (33, 33), (64, 7)]
SHAPES += [(64, 8), (64, 9), (100, 50), (127, 1), (255, 31), (256, 31), (256, 32), (256, 256)]
SHAPES += [(257, 16), (257, 17), (512, 31), (512, 32), (1000, 1), (1024, 100), (1025, 64)]
# Rows of several warps, and the first row that a thread block does not hold.
SHAPES += [(2048, 64), (2049, 500), (4096, 205), (8191, 4000), (8192, 511), (8193, 400)]
WIDE = [(16384, 3), (16385, 1024), (65535, 4095), (65536, 4095), (65536, 4096), (65537, 1)]
WIDE += [(65537, 5000), (70001, 70001)]


def check(backend, x, k, value_dtype, offset=0):
    """Compare row_pack with the oracle, then row_gather and row_unpack at the same positions."""
    arena = Arena(backend.device, offset)
    values, positions = backend.row_pack(arena.read(x), k, value_dtype)
    arena.check()
    expected = oracle.row_pack(bits.numbers(x), k, bits.name(value_dtype))
    assert (values.dtype, positions.dtype) == (value_dtype, torch.uint8)
    assert values.is_contiguous()
    assert positions.is_contiguous()
    bits.assert_equal(positions.cpu().numpy(), expected[1], "positions")
    bits.assert_floats(values, expected[0], "values")
    positions = positions.cpu()
    check_gather(backend, hard_rows(*x.shape, x.dtype), k, positions, value_dtype, offset)
    check_unpack(backend, values.cpu(), x.shape[1], positions, x.dtype, offset)
    return values.cpu(), positions


def check_gather(backend, x, k, positions, value_dtype, offset=0):
    arena = Arena(backend.device, offset)
    result = backend.row_gather(arena.read(x), arena.read(positions), k, value_dtype)
    arena.check()
    expected = oracle.row_gather(bits.numbers(x), positions.numpy(), k, bits.name(value_dtype))
    assert result.dtype == value_dtype
    assert result.is_contiguous()
    bits.assert_floats(result, expected, "gathered")
    return result.cpu()


def check_unpack(backend, values, width, positions, dtype, offset=0):
    arena = Arena(backend.device, offset)
    result = backend.row_unpack(arena.read(values), arena.read(positions), width, dtype)
    arena.check()
    expected = oracle.row_unpack(bits.numbers(values), positions.numpy(), width, bits.name(dtype))
    assert result.dtype == dtype
    assert result.is_contiguous()
    bits.assert_floats(result, expected, "unpacked")
    return result.cpu()


def hard_rows(rows, width, dtype=torch.float32, non_finite=True):
    return samples.hard(rows * width, dtype, non_finite=non_finite).view(rows, width)


@x_dtypes
@pytest.mark.parametrize(("width", "k"), SHAPES)
def test_shapes(backend, width, k, dtype):
    check(backend, hard_rows(9, width, dtype), k, bits.FLOATS[k % 3])


@pytest.mark.parametrize(("width", "k"), WIDE)
def test_wide_rows(backend, width, k):
    check(backend, hard_rows(2, width), k, torch.bfloat16)


@x_dtypes
@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 1000])
def test_rows(backend, rows, dtype):
    """The encodings are uint8 columns, a bitmap and uint16 columns."""
    for width, k in [(40, 3), (40, 20), (600, 5)]:
        check(backend, hard_rows(rows, width, dtype), k, dtype)


def test_by_hand(backend):
    """Encodes a bitmap (least significant bit first), uint8 columns and little-endian uint16."""
    x = torch.zeros(1, 10)
    x[0, [0, 3, 9]] = torch.tensor([1.0, -3.0, 2.0])
    values, positions = check(backend, x, 3, torch.float32)
    assert values.tolist() == [[1.0, -3.0, 2.0]]
    assert positions.tolist() == [[0b00001001, 0b10]]
    values, positions = check(backend, x, 1, torch.float32)
    assert (values.tolist(), positions.tolist()) == ([[-3.0]], [[3]])
    x = torch.zeros(1, 1000)
    x[0, [5, 600]] = torch.tensor([7.0, 8.0])
    values, positions = check(backend, x, 2, torch.float32)
    assert (values.tolist(), positions.tolist()) == ([[7.0, 8.0]], [[5, 0, 600 % 256, 600 // 256]])


def test_ties_go_to_the_lower_column(backend):
    x = torch.tensor([[1.0, -2.0, 2.0, -1.0, 1.0, 2.0, -2.0, 0.0]] * 3)
    for k, columns in [(1, [1]), (2, [1, 2]), (4, [1, 2, 5, 6]), (5, [0, 1, 2, 5, 6])]:
        values, _ = check(backend, x, k, torch.float32)
        assert values.tolist() == x[:, columns].tolist()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1e-45, math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize(("width", "k"), [(33, 5), (200, 3), (700, 20), (5001, 300)])
def test_rows_of_one_value(backend, value, width, k):
    check(backend, torch.full((3, width), value), k, torch.float32)


def test_nan_ranks_as_infinity_and_signed_zeros_are_equal(backend):
    nan, inf = math.nan, math.inf
    x = torch.tensor([[1.0, inf, nan, -inf, nan, 0.0], [-0.0, 0.0, -0.0, 0.0, 1e-45, -0.0]])
    for k in range(1, 7):
        check(backend, x, k, torch.bfloat16)
    every_nan = bits.from_raw(np.array(samples.NAN_BITS * 6, np.uint32), torch.float32).view(1, -1)
    for k in (1, 2, 20):
        check(backend, every_nan, k, torch.float32)


@value_dtypes
@x_dtypes
def test_values_are_rounded_like_a_cast(backend, dtype, value_dtype):
    """Overflow becomes infinity, unlike in mask_pack. NaN becomes the positive quiet NaN."""
    x = hard_rows(40, 100, dtype)
    values, _ = check(backend, x, 100, value_dtype)
    nan = x.isnan()
    assert torch.equal(values.isnan(), nan)
    assert torch.equal(values[~nan], x.to(value_dtype)[~nan])


@x_dtypes
@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_views(backend, offset, dtype):
    for width, k in [(32, 3), (33, 10), (512, 20)]:
        check(backend, hard_rows(20, width, dtype), k, torch.float32, offset)
