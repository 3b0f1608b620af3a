"""Rows in few bits between ranks and between modules: what arrives, what comes back, how much."""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from oracle import quantized_rows as oracle

from dct_kernels import row_dequantize, row_quantize
from dct_kernels.row_layout import FORMATS, row_bytes
from dct_parallel import (
    RowDequantize,
    RowFormat,
    RowQuantize,
    all_gather_rows,
    all_gather_rows_async,
    all_to_all_rows,
    all_to_all_rows_async,
)
from dct_parallel.rows import codecs
from ranks import on_ranks
from wire_meter import WireMeter

WIDTH = 37
TABLE_BYTES = 40  # to every other rank: how many rows, and four settings
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAIRS = [("int4", "int4"), ("int8", "ternary"), ("ternary", "sign"), ("bfloat16", "float16")]


def _through(x, format):
    """What arrives of x, in x's dtype."""
    if format in DTYPES:
        return x.to(DTYPES[format]).to(x.dtype)
    return row_dequantize(row_quantize(x, format), x.shape[1], format, x.dtype)


def _bytes(width, format):
    return width * DTYPES[format].itemsize if format in DTYPES else row_bytes(width, format)


def _splits(source, ranks):
    return [0 if source == r == 1 else 1 + (source + 2 * r) % 3 for r in range(ranks)]


def _rows(source, ranks):
    generator = torch.Generator().manual_seed(source)
    return torch.randn(sum(_splits(source, ranks)), WIDTH, generator=generator)


def _grads(rank, ranks):
    received = sum(_splits(source, ranks)[rank] for source in range(ranks))
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(received, WIDTH, generator=generator)


def _expected(rank, ranks, forward, backward):
    arrived = [
        _through(_rows(source, ranks), forward).split(_splits(source, ranks))[rank]
        for source in range(ranks)
    ]
    returned = []
    for r in range(ranks):
        from_sources = [_splits(source, ranks)[r] for source in range(ranks)]
        returned.append(_through(_grads(r, ranks), backward).split(from_sources)[rank])
    return torch.cat(arrived), torch.cat(returned)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_all_to_all(rank):
    ranks = dist.get_world_size()
    splits = _splits(rank, ranks)
    into = [_splits(source, ranks)[rank] for source in range(ranks)]
    for forward, backward in PAIRS:
        for known in (None, into):
            for exchange in (all_to_all_rows, all_to_all_rows_async):
                x = _rows(rank, ranks).requires_grad_()
                with WireMeter() as meter:
                    y = exchange(x, splits, known, format=RowFormat(forward, backward))
                    sent = meter.take()
                    y = y.wait() if exchange is all_to_all_rows_async else y
                    y.backward(_grads(rank, ranks))
                    returned = meter.take()
                arrived, gradient = _expected(rank, ranks, forward, backward)
                assert torch.equal(y, arrived) and torch.equal(x.grad, gradient)
                table = 0 if known else TABLE_BYTES * (ranks - 1)
                assert sent == table + (sum(splits) - splits[rank]) * _bytes(WIDTH, forward)
                assert returned == (sum(into) - into[rank]) * _bytes(WIDTH, backward)


@on_ranks(2)
def test_all_gather(rank):
    ranks = dist.get_world_size()
    widths = [WIDTH + 3 * r for r in range(ranks)]
    parts = [
        torch.randn(4, width, generator=torch.Generator().manual_seed(width)) for width in widths
    ]
    grads = [
        torch.randn(4, sum(widths), generator=torch.Generator().manual_seed(r))
        for r in range(ranks)
    ]
    for forward, backward in [*PAIRS, ("float32", "float32")]:
        for gather in (all_gather_rows, all_gather_rows_async):
            x = parts[rank].clone().requires_grad_()
            y = gather(x, format=RowFormat(forward, backward))
            y = y.wait() if gather is all_gather_rows_async else y
            assert torch.equal(y, torch.cat([_through(part, forward) for part in parts], 1))
            y.backward(grads[rank])
            total = torch.zeros(4, widths[rank])
            for grad in grads:
                total += _through(grad.split(widths, 1)[rank].contiguous(), backward)
            assert torch.equal(x.grad, total)


@on_ranks(2)
def test_two_transfers_in_flight(rank):
    first, second = torch.randn(2, 8, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    transfers = [all_to_all_rows_async(x, [1, 1], format="float32") for x in (first, second)]
    received = [transfer.wait() for transfer in transfers]
    (received[0].sum() + 2 * received[1].sum()).backward()
    assert torch.equal(first.grad, torch.ones(2, 8))
    assert torch.equal(second.grad, torch.full((2, 5), 2.0))
    with pytest.raises(RuntimeError, match=r"wait\(\) must be called once"):
        transfers[0].wait()


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
