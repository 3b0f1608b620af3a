"""row_quantize, and row_dequantize of its rows: scales and codes of every format, bit for bit."""

import math

import pytest
import torch
from oracle import quantized_rows as oracle

from conformance import bits, samples
from conformance.memory import Arena
from dct_kernels import row_layout

x_dtypes = pytest.mark.parametrize("dtype", bits.FLOATS, ids=bits.name)
formats = pytest.mark.parametrize("format", oracle.FORMATS)

# Widths around multiples of bytes (2 or 8 codes), vectors, warps, blocks of 32 entries and
# Triton tiles.
WIDTHS = (1, 2, 4, 5, 6, 7, 8, 9, 16, 31, 32, 33, 64, 127, 128, 255, 256)
WIDTHS += (1023, 1024, 1025, 2048, 2049, 2052, 4096, 4099, 8191, 8192, 8193)


def check(backend, x, format, offset=0):
    """Compare row_quantize, and row_dequantize of its rows, with the oracle; return the rows."""
    arena = Arena(backend.device, offset)
    rows = backend.row_quantize(arena.read(x), format)
    arena.check()
    assert rows.dtype == torch.uint8
    assert rows.is_contiguous()
    expected = oracle.row_quantize(bits.numbers(x), format)
    rows = rows.cpu()
    bits.assert_equal(rows.numpy(), expected, f"{format} rows")
    check_dequantize(backend, rows, x.shape[1], format, x.dtype, offset)
    return rows


def check_dequantize(backend, rows, width, format, dtype=torch.float32, offset=0):
    arena = Arena(backend.device, offset)
    out = backend.row_dequantize(arena.read(rows), width, format, dtype)
    arena.check()
    assert out.dtype == dtype
    assert out.is_contiguous()
    expected = oracle.row_dequantize(rows.numpy(), width, format, bits.name(dtype))
    bits.assert_floats(out, expected, f"{format} dequantized")
    return out.cpu()


def rows_of_kinds(width, dtype=torch.float32):
    """Rows of normal and special values, zeros, a single nonzero entry, and an outlier."""
    kinds = [
        samples.normal(2 * width, dtype).view(2, width),
        samples.hard(2 * width, dtype, non_finite=False).view(2, width),
        samples.hard(width, dtype, seed=1).view(1, width),
        torch.zeros(1, width, dtype=dtype),
        torch.eye(1, width, dtype=dtype) * -3,
        samples.normal(width, dtype, seed=2).view(1, width),
    ]
    kinds[-1][0, width // 2] = 5000.0
    return torch.cat(kinds)


@formats
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(backend, width, format):
    check(backend, rows_of_kinds(width), format)


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=bits.name)
def test_dtypes(backend, dtype, format):
    for width in (7, 16, 31, 64, 257, 1024, 2052, 4096, 8192):
        check(backend, rows_of_kinds(width, dtype), format)


@formats
@pytest.mark.parametrize("width", [20000, 70001])
def test_wide_rows(backend, width, format):
    check(backend, samples.normal(2 * width).view(2, width), format)


@formats
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 300])
def test_rows(backend, rows, format):
    for width in (13, 64):
        check(backend, samples.normal(rows * width).view(rows, width), format)


@formats
@x_dtypes
@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_views(backend, offset, dtype, format):
    for width in (64, 20):
        check(backend, rows_of_kinds(width, dtype), format, offset)


@formats
def test_rows_of_every_exponent(backend, format):
    """Magnitudes range from values that round to zero to the largest float32 number."""
    x = samples.normal(16 * 256).view(256, 16).clamp(-3, 3) / 3
    exponents = torch.arange(-127, 129).clamp(max=127).view(256, 1)
    x = (x.double() * torch.exp2(exponents.double())).float()
    x[-1] = torch.finfo(torch.float32).max
    check(backend, x, format)


@formats
def test_random_bits(backend, format):
    check(backend, samples.patterns(40 * 33).view(40, 33), format)


def test_int8_by_hand(backend):
    """Ties round to even. The scale is rounded, so the largest code has magnitude 126 or 127."""
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -0.0, -126.5, 1e-30]])
    rows = check(backend, x, "int8")
    assert rows.view(torch.int8)[0, :-2].tolist() == [127, 0, 2, -2, 0, -126, 0]
    assert rows[0, -2:].tolist() == [0x80, 0x3F]
    for seed in range(3):
        x = samples.normal(50 * 64, seed=seed).view(50, 64)
        codes = check(backend, x, "int8").view(torch.int8)[:, :-2].int()
        assert codes.abs().amax(1).ge(126).all()


def test_int4_by_hand(backend):
    """A byte holds two columns, with the first one in the low nibble."""
    rows = check(backend, torch.tensor([[7.0, -7.0, 2.5]]), "int4")
    assert rows.tolist() == [[0x97, 0x02, 0x80, 0x3F]]


def test_sign_by_hand(backend):
    """The first column is the least significant bit. A zero of either sign has bit 0."""
    x = torch.tensor([[-1.0, 1.0, -1.0, -0.0, 0.0, 2.0, -2.0, 1.0, -2.0]])
    rows = check(backend, x, "sign")
    assert rows[0, :-2].tolist() == [0b01000101, 1]
    assert rows[0, -2:].tolist() == [0x8E, 0x3F]  # a scale of 10 / 9


@formats
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_with_nan_or_infinity_has_a_nan_scale(backend, bad, format):
    """The scale of this row becomes NaN; other rows are unchanged."""
    clean = check(backend, samples.normal(3 * 100).view(3, 100), format)
    for column in (0, 40, 99):
        x = samples.normal(3 * 100).view(3, 100)
        x[1, column] = bad
        rows = check(backend, x, format)
        assert rows[1].tolist() == [0] * (rows.shape[1] - 2) + [0xC0, 0x7F]
        assert torch.equal(rows[::2], clean[::2])


@formats
def test_row_bytes(format):
    for width in WIDTHS:
        assert row_layout.row_bytes(width, format) == oracle.row_bytes(width, format)
