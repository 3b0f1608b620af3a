"""row_dequantize: values computed by hand, and arbitrary bytes. See also test_row_quantize.py."""

import numpy as np
import pytest
import torch
from oracle import quantized_rows as oracle

from conformance import bits
from conformance.test_row_quantize import check_dequantize as check
from conformance.test_row_quantize import formats

dtypes = pytest.mark.parametrize("dtype", bits.FLOATS, ids=bits.name)


def garbage(rows, width, format, seed=0):
    rng = np.random.default_rng([seed, rows, width])
    raw = rng.integers(0, 256, (rows, oracle.row_bytes(width, format)), dtype=np.uint8)
    return torch.from_numpy(raw)


@formats
@dtypes
def test_garbage(backend, dtype, format):
    """Rows are random bytes, all zeros or all ones."""
    for width in (1, 7, 64, 1025, 4099):
        rows = garbage(40 if width < 1000 else 4, width, format)
        rows = torch.cat([rows, rows[:1] * 0, rows[:1] * 0 + 255])
        check(backend, rows, width, format, dtype)


@formats
def test_every_byte(backend, format):
    """All bytes are valid, even codes that row_quantize never writes (int8 -128 and int4 -8)."""
    each = {"int8": 1, "int4": 2, "sign": 8}[format]
    rows = torch.arange(256).to(torch.uint8).view(256, 1)
    scale = torch.tensor([0x80, 0x3F], dtype=torch.uint8)
    check(backend, torch.cat([rows, scale.expand(256, -1)], 1), each, format)


@formats
@dtypes
def test_every_scale(backend, dtype, format):
    """Scales include NaN, infinite, negative and subnormal ones. Each row has one byte of codes."""
    scales = torch.arange(0, 2**16, 7 if backend.device == "cpu" else 1)
    rows = torch.full((len(scales), 3), 0x7E, dtype=torch.uint8)
    rows[:, 1], rows[:, 2] = (scales & 255).to(torch.uint8), (scales >> 8).to(torch.uint8)
    check(backend, rows, 1, format, dtype)


def test_by_hand(backend):
    rows = torch.tensor([[0x80, 0x7F, 0, 0, 0xC0]], dtype=torch.uint8)  # a scale of -2
    assert check(backend, rows, 3, "int8").tolist() == [[256.0, -254.0, 0.0]]
    assert bits.raw(check(backend, rows, 3, "int8"))[0, 2] == 0x80000000
    assert check(backend, rows[:, 1:], 4, "int4").tolist() == [[2.0, -14.0, 0.0, 0.0]]
    rows = torch.tensor([[79, 0x00, 0x40]], dtype=torch.uint8)  # 79 = 0b1001111
    assert check(backend, rows, 5, "sign").tolist() == [[-2.0, -2.0, -2.0, -2.0, 2.0]]
