"""Functions and modules for rows: the largest entries, or all entries in a quantized format."""

import dataclasses
import doctest
import re
from functools import partial

import numpy as np
import pytest
import torch
from oracle import rows as oracle

from dct_parallel import (
    RowDequantize,
    RowFormat,
    RowPack,
    RowQuantize,
    RowUnpack,
    pack_rows,
    unpack_rows,
)
from dct_parallel.rows import codecs, packing
from support.row_oracle import DTYPES, named_bytes, through

WIDTH = 37
PAIRS = [("int4", "int4"), ("int8", "int4"), ("sign", "int8"), ("bfloat16", "float16")]


def _columns(x, k):
    """Return int64 [..., k]: for each row, the ascending columns of its k largest magnitudes."""
    chosen = [oracle.largest(row, k) for row in x.detach().flatten(0, -2).numpy()]
    return torch.tensor(np.array(chosen, np.int64).reshape(*x.shape[:-1], k))


def test_docstring_examples():
    result = doctest.testmod(packing)
    assert result.attempted == 2 and result.failed == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 40), (2, 3, 40), (0, 40), (0, 4, 40), (3, 1)])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.5, 1.0])
def test_forward_and_backward_against_an_oracle(shape, density, dtype):
    x = torch.randn(shape, requires_grad=True)
    k = packing.row_k(shape[-1], density)
    assert k == max(1, round(density * shape[-1]))
    values, positions = pack_rows(x, k, dtype)
    y = unpack_rows(values, positions, shape[-1], torch.float32)
    columns = _columns(x, k)
    mask = torch.zeros(shape).scatter(-1, columns, 1.0)

    assert torch.equal(values, x.gather(-1, columns).to(dtype))
    assert positions.shape == (*shape[:-1], oracle.encoding(shape[-1], k)[1])
    assert y.dtype == torch.float32 and torch.equal(y, x.to(dtype).float() * mask)
    weight = torch.randn(shape)
    values.retain_grad()
    (weight * y).sum().backward()
    assert torch.equal(x.grad, weight.to(dtype).float() * mask)  # with a constant mask
    assert values.grad.shape == values.shape  # only k gradients per row are sent back
    assert values.grad.dtype == dtype and not positions.requires_grad


def test_eval_mode_compresses_unless_inference_is_false():
    x = torch.randn(3, 32)
    on = RowPack(density=0.1, format=torch.bfloat16)
    off = RowPack(k=4, format=torch.bfloat16, inference=False)
    unpack = RowUnpack(32, torch.float32)
    assert unpack(*off(x)).count_nonzero() == 3 * 4
    assert unpack(*off(x)).dtype == torch.float32  # not the values' dtype
    assert RowUnpack(32)(*off(x)).dtype == torch.bfloat16
    values = on.eval()(x)[0]
    assert values.shape == (3, 4) and values.dtype == torch.bfloat16
    assert torch.equal(unpack(*off.eval()(x)), x)
    assert unpack(*off.train()(x)).count_nonzero() == 3 * 4


KNOWN = "'float32', 'bfloat16', 'float16', 'int8', 'int4' or 'sign'"
MISMATCH = torch.ones(3, 1, 2), torch.ones(1, 3, 1, dtype=torch.uint8)  # values, positions


def test_errors_name_the_argument():
    x = torch.randn(2, 8)
    for text, function, *args in (
        ("x must be float32, bfloat16 or float16", pack_rows, x.double(), 2),
        ("dct::row_pack: k must be in [1, 8], got 9", pack_rows, x, 9),
        ("pack_rows: x must be at least 1-D, got 0-D", pack_rows, x[0, 0], 1),
        ("shape [3, 1, w] for values of shape [3, 1, 2], got [1, 3, 1]", unpack_rows, *MISMATCH, 8),
        ("RowPack: exactly one of density and k must be given, got", RowPack),
        ("format must be 'float32'", partial(RowPack, 0.5, format=torch.int8)),
        (f"RowQuantize: format must be {KNOWN}, got 'int3'", RowQuantize, "int3"),
        ("x.shape[-1] must be in [1, 2147483647]", RowQuantize("int4"), x[:, :0]),
        ("a number format without density", RowQuantize, RowFormat(density=0.5)),
        ("shape [..., 3] for width 8, got [2, 8]", RowDequantize(8, "int4"), x.bfloat16()),
        (f"forward must be {KNOWN}, got 'int5'", RowFormat, "int5", "int4"),
        (f"backward must be {KNOWN}, got 'ter", RowFormat, "int4", "ternary"),
        ("'float16' with a density, got 'int4'", RowFormat, "int4", None, 0.5),
        ("None with a density, got 'int4'", RowFormat, None, "int4", 0.5),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            function(*args)


def test_row_format_is_hashable_and_frozen():
    assert RowFormat(torch.bfloat16, backward="sign") == RowFormat("bfloat16", "sign")
    assert len({RowFormat(density=0.5), RowFormat(density=0.5), RowFormat("int4")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        RowFormat("int4").forward = "int8"


@pytest.mark.parametrize(("forward", "backward"), [*PAIRS, ("float32", "float32")])
@pytest.mark.parametrize("shape", [(WIDTH,), (3, WIDTH), (2, 3, WIDTH), (0, WIDTH)])
def test_quantize_modules_match_the_ops(shape, forward, backward):
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    message = RowQuantize(RowFormat(forward, backward))(x)
    carried = message.detach().clone().requires_grad_()  # as after a transfer to another device
    y = RowDequantize(WIDTH, RowFormat(forward, backward))(carried)
    y.backward(grad)
    assert carried.grad.shape == message.shape and carried.grad.dtype == message.dtype
    message.backward(carried.grad)
    longer = max(named_bytes(WIDTH, forward), named_bytes(WIDTH, backward))
    assert message.shape == (*shape[:-1], (longer + 1) // 2) and message.dtype == torch.bfloat16
    flat = (-1, WIDTH)
    assert torch.equal(y.view(flat), through(x.detach().view(flat), forward))
    assert torch.equal(x.grad.view(flat), through(grad.view(flat), backward))


@pytest.mark.parametrize("rows", [0, 3])
def test_codecs_accept_unusual_strides(rows):
    """An op with k = 1 and no rows may return strides (1, 0), which cannot be viewed as bytes."""
    values = torch.arange(float(rows)).as_strided((rows, 1), (1, 0))
    for format in DTYPES:
        message = codecs.quantize(values, format)
        assert message.shape == (rows, DTYPES[format].itemsize)
        assert torch.equal(codecs.dequantize(message, 1, format, torch.float32), values)
