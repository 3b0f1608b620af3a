"""RowFormat, and the modules for rows in few bits."""

import dataclasses
import re

import pytest
import torch
from oracle import quantized_rows as oracle

from dct_kernels import row_dequantize, row_quantize
from dct_kernels.row_layout import FORMATS, row_bytes
from dct_parallel import RowDequantize, RowFormat, RowQuantize
from dct_parallel.rows import codecs

WIDTH = 37
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAIRS = [("int4", "int4"), ("int8", "ternary"), ("ternary", "sign"), ("bfloat16", "float16")]


def _through(x, format):
    """What arrives of x, in x's dtype."""
    if format in DTYPES:
        return x.to(DTYPES[format]).to(x.dtype)
    return row_dequantize(row_quantize(x, format), x.shape[1], format, x.dtype)


def _bytes(width, format):
    return width * DTYPES[format].itemsize if format in DTYPES else row_bytes(width, format)


def test_a_format_is_a_value():
    assert RowFormat(torch.bfloat16, backward="sign") == RowFormat("bfloat16", "sign")
    assert len({RowFormat(density=0.5), RowFormat(density=0.5), RowFormat("int4")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        RowFormat("int4").forward = "int8"


KNOWN = "'float32', 'bfloat16', 'float16', 'int8', 'int4', 'ternary' or 'sign'"


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (("int5", "int4"), ValueError, f"forward must be {KNOWN}, got 'int5'"),
        (("int4", "int5"), ValueError, f"backward must be {KNOWN}, got 'int5'"),
        ((torch.int8,), ValueError, f"forward must be {KNOWN}, got torch.int8"),
        ((8,), TypeError, "forward must be a string or a torch.dtype, got int"),
        (("int4", None, 0.5), ValueError, "'bfloat16' or 'float16' with a density, got 'int4'"),
        ((None, "int4", 0.5), ValueError, "backward must be None with a density, got 'int4'"),
        ((None, None, 0), ValueError, "density must be in (0, 1], got 0"),
        ((None, None, 1.5), ValueError, "density must be in (0, 1], got 1.5"),
        ((None, None, "1"), TypeError, "density must be a number, got '1'"),
    ],
)
def test_formats_that_are_refused(given, error, text):
    with pytest.raises(error, match=re.escape(text)):
        RowFormat(*given)


@pytest.mark.parametrize(("forward", "backward"), [*PAIRS, ("float32", "float32")])
@pytest.mark.parametrize("shape", [(WIDTH,), (3, WIDTH), (2, 3, WIDTH), (0, WIDTH)])
def test_modules_carry_rows_and_gradients(shape, forward, backward):
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    message = RowQuantize(RowFormat(forward, backward))(x)
    carried = message.detach().clone().requires_grad_()  # as a transport between devices does
    y = RowDequantize(WIDTH, RowFormat(forward, backward))(carried)
    y.backward(grad)
    assert carried.grad.shape == message.shape and carried.grad.dtype == message.dtype
    message.backward(carried.grad)
    longer = max(_bytes(WIDTH, forward), _bytes(WIDTH, backward))
    assert message.shape == (*shape[:-1], (longer + 1) // 2) and message.dtype == torch.bfloat16
    flat = (-1, WIDTH)
    assert torch.equal(y.view(flat), _through(x.detach().view(flat), forward))
    assert torch.equal(x.grad.view(flat), _through(grad.view(flat), backward))


def test_modules_name_what_is_wrong():
    with pytest.raises(ValueError, match="RowQuantize: format must be 'float32'"):
        RowQuantize("int3")
    with pytest.raises(
        ValueError, match=re.escape("message must have shape [..., 3] for width 8, got [1, 4]")
    ):
        RowDequantize(8, "int4")(torch.zeros(1, 4, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="dtype of message must be bfloat16, got float32"):
        RowDequantize(8, "int4")(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="at least 1-D, got 0-D float32"):
        RowQuantize("int4")(torch.tensor(1.0))


@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_row_is_some_numbers_and_no_other_row_changes(format):
    """Whatever bytes a transport makes of one row's message, forward and backward."""
    x = torch.randn(5, WIDTH, requires_grad=True)
    message = RowQuantize(format)(x)
    damaged = message.detach().clone()
    generator = torch.Generator().manual_seed(3)
    damaged[2:3].view(torch.uint8).random_(256, generator=generator)
    y = RowDequantize(WIDTH, format)(damaged)
    message.backward(damaged)
    rows = damaged.view(torch.uint8)[:, : row_bytes(WIDTH, format)].numpy()
    raw = oracle.row_dequantize(rows, WIDTH, format, "float32")
    expected = torch.from_numpy(raw.copy()).view(torch.float32)
    sound = [0, 1, 3, 4]
    for got in (y, x.grad):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got[sound], _through(x.detach(), format)[sound])


@pytest.mark.parametrize("rows", [0, 3])
def test_bytes_of_values_with_odd_strides(rows):
    """Without rows an op of k = 1 may return strides (1, 0): no dimension to view as bytes."""
    values = torch.arange(float(rows)).as_strided((rows, 1), (1, 0))
    for format in DTYPES:
        message = codecs.quantize(values, format)
        assert message.shape == (rows, DTYPES[format].itemsize)
        assert torch.equal(codecs.dequantize(message, 1, format, torch.float32), values)
