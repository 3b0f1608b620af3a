"""all_to_all_rows and all_gather_rows: values, gradients, bytes and errors."""

import gc
import re
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import rows as oracle

from dct_parallel import (
    RowFormat,
    all_gather_rows,
    all_gather_rows_async,
    all_to_all_rows,
    all_to_all_rows_async,
)
from dct_parallel.rows import transfer
from dct_parallel.rows.packing import row_k
from support.ranks import on_ranks, run_ranks
from support.row_oracle import DTYPES, named_bytes, through
from wire_meter import WireMeter

ALL, HALF, TENTH = (RowFormat(density=density) for density in (1.0, 0.5, 0.1))
FORMATS = [
    *(ALL, HALF, TENTH, RowFormat(density=0.01), RowFormat(torch.bfloat16, density=0.1)),
    *(RowFormat(*pair) for pair in (["int4"], ["int8", "sign"], ["sign", "int4"])),
    *(RowFormat(*pair) for pair in (["bfloat16", "float16"], ["float32"])),
]
WIDTH, ROWS = 37, 6
TABLE_BYTES = 40  # a count and four settings, to each other rank


def _mask(x, format):
    """Return 1 for entries that are sent, else 0."""
    if format.density is None:
        return torch.ones_like(x)
    mask, k = torch.zeros(x.shape), row_k(x.shape[1], format.density)
    for row, values in zip(mask, x.numpy(), strict=True):
        row[oracle.largest(np.asarray(values), k)] = 1
    return mask


def _received(x, format):
    return through(x, format.forward or "float32") * _mask(x, format)


def _gradient(grad, format):
    return through(grad, format.backward or format.forward or "float32")


def _bytes(width, format):
    """Return the bytes of a row and of its gradient."""
    forward = format.forward or "float32"
    if format.density is not None:
        k = row_k(width, format.density)
        values = k * DTYPES[forward].itemsize
        return values + oracle.encoding(width, k)[1], values
    return named_bytes(width, forward), named_bytes(width, format.backward or forward)


def _random(seed, rows, width=WIDTH):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def _splits(source, ranks):
    """Return how many rows `source` sends to each rank. Rank 2 sends and receives none."""
    return [0 if 2 in (source, r) else 1 + (3 * source + 2 * r) % 5 for r in range(ranks)]


def _output_splits(rank, ranks):
    return [_splits(source, ranks)[rank] for source in range(ranks)]


def _measured(exchange, x, grad):
    """Return the result of an exchange, the gradient of x, and the bytes sent forward and back."""
    x = x.clone().requires_grad_()
    with WireMeter() as meter:
        y = exchange(x)
        forward = meter.take()
        y = y if isinstance(y, torch.Tensor) else y.wait()
        y.backward(grad)
        return y.detach(), x.grad, (forward, meter.take())


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks("world_size")
def test_all_to_all(rank):
    ranks = dist.get_world_size()
    splits, into = _splits(rank, ranks), _output_splits(rank, ranks)
    rows = [_random(r, sum(_splits(r, ranks))) for r in range(ranks)]
    grads = [_random(100 + r, sum(_output_splits(r, ranks))) for r in range(ranks)]
    returned = [grads[r].split(_output_splits(r, ranks))[rank] for r in range(ranks)]
    for format in FORMATS:
        parts = [_received(rows[r], format).split(_splits(r, ranks))[rank] for r in range(ranks)]
        gradient = _gradient(torch.cat(returned), format) * _mask(rows[rank], format)
        for known in (None, into):
            table = 0 if known else TABLE_BYTES * (ranks - 1)
            forward, backward = _bytes(WIDTH, format)
            sent = table + (sum(splits) - splits[rank]) * forward
            sent_back = (sum(into) - into[rank]) * backward
            for function in (all_to_all_rows, all_to_all_rows_async):
                y, grad, sizes = _measured(
                    lambda x, f=function, k=known, fmt=format: f(x, splits, k, format=fmt),
                    rows[rank],
                    grads[rank],
                )
                assert torch.equal(y, torch.cat(parts)) and torch.equal(grad, gradient)
                assert y.dtype == grad.dtype == torch.float32 and sizes == (sent, sent_back)


def _gathers(rank, widths):
    ranks = len(widths)
    rows = [_random(r, ROWS, width) for r, width in enumerate(widths)]
    grads = [_random(50 + r, ROWS, sum(widths)) for r in range(ranks)]
    for format in FORMATS:
        total = torch.zeros(ROWS, widths[rank])
        for grad in grads:  # in rank order in float32, so that the result is bitwise identical
            total += _gradient(grad.split(widths, 1)[rank], format)
        sizes = [_bytes(width, format) for width in widths]
        sent = (ranks - 1) * ROWS * max(forward for forward, _ in sizes)
        sent_back = ROWS * sum(size for r, (_, size) in enumerate(sizes) if r != rank)
        for known in (None, widths):
            table = 0 if known else TABLE_BYTES * (ranks - 1)
            for function in (all_gather_rows, all_gather_rows_async):
                y, grad, found = _measured(
                    lambda x, f=function, k=known, fmt=format: f(x, k, format=fmt),
                    rows[rank],
                    grads[rank],
                )
                assert torch.equal(y, torch.cat([_received(x, format) for x in rows], 1))
                assert torch.equal(grad, total * _mask(rows[rank], format))
                assert found == (table + sent, sent_back)


@pytest.mark.parametrize("widths", [[40, 40], [1, 300], [16, 40, 1, 9]], ids=str)
def test_all_gather(widths):
    run_ranks(_gathers, len(widths), widths)


@on_ranks(2)
def test_single_column_empty_and_noncontiguous_rows(rank):
    one = all_to_all_rows(torch.tensor([[5.0 + rank], [7.0 + rank]]), [1, 1], format=HALF)
    assert one.tolist() == [[5.0 + rank * 2], [6.0 + rank * 2]]  # one column
    none = torch.zeros(0, 8, requires_grad=True)
    scattered, gathered = (
        all_to_all_rows(none, [0, 0], format=HALF),
        all_gather_rows(none, format=HALF),
    )
    (scattered.sum() + gathered.sum()).backward()
    assert scattered.shape == none.grad.shape == (0, 8) and gathered.shape == (0, 16)
    x = torch.randn(8, 4).bfloat16().t()  # not contiguous; rank 1 sends no rows
    sent, splits = (x, [1, 3]) if rank == 0 else (x[:0], [0, 0])
    expected = all_to_all_rows(sent.contiguous(), splits, format=ALL)
    assert torch.equal(all_to_all_rows(sent, splits, format=ALL), expected)
    assert torch.equal(all_gather_rows(x, format=ALL)[:, 8 * rank : 8 * rank + 8], x)
    alone = dist.new_group([1])
    if rank == 1:
        assert torch.equal(all_to_all_rows(x, [4], format=ALL, group=alone), x)
        assert torch.equal(all_gather_rows(x, format=ALL, group=alone), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_ranks(3)
def test_gradients_of_16_bit_rows_are_summed_in_float32(rank, dtype):
    """The sum is in rank order, and is rounded once."""
    grads = [_random(r, ROWS, 3 * WIDTH).to(dtype) for r in range(3)]
    for format, sent_as in DTYPES.items():
        x = _random(9, ROWS).to(dtype).requires_grad_()
        all_gather_rows(x, format=format).backward(grads[rank])
        first, second, third = (g.split(WIDTH, 1)[rank].to(sent_as).float() for g in grads)
        assert torch.equal(x.grad, (first + second + third).to(dtype)), format


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


@on_ranks(3)
def test_a_subgroup(rank):
    """Global ranks 1 and 2 are ranks 0 and 1 of the group."""
    group, splits = dist.new_group([1, 2]), [1, 2]
    rows = [_random(r, 3, 4) for r in range(2)]
    if rank == 0:
        for function in (all_to_all_rows, all_gather_rows):
            with pytest.raises(ValueError, match="group must be a process group that this rank is"):
                function(rows[0], splits, format=ALL, group=group)
        return
    x = rows[rank - 1].requires_grad_()
    y = all_to_all_rows(x, splits, format=ALL, group=group)
    assert torch.equal(y, torch.cat([part.split(splits)[rank - 1] for part in rows]))
    z = all_gather_rows(x, format=ALL, group=group)
    assert torch.equal(z, torch.cat(rows, 1))
    (rank * y.sum() + rank * z.sum()).backward()
    from_scatter = torch.tensor([1.0, 2.0, 2.0]).unsqueeze(
        1
    )  # row i went to this rank of the group
    assert torch.equal(x.grad, from_scatter.expand(3, 4) + 3)


@on_ranks(2)
def test_requires_grad_may_differ_with_no_grad(rank):
    rows = [_random(r, 3) for r in range(2)]
    with torch.no_grad():
        x = rows[rank].requires_grad_(rank == 0)
        y, gathered = all_to_all_rows(x, [1, 2], format=ALL), all_gather_rows(x, format=ALL)
    assert not y.requires_grad and not gathered.requires_grad
    assert torch.equal(gathered, torch.cat(rows, 1))


@pytest.mark.parametrize("function", [all_to_all_rows, all_gather_rows])
def test_missing_process_group_raises(function):
    with pytest.raises(ValueError, match="group must be a process group if torch"):
        function(_random(0, 3), [1, 2], format=ALL)


def test_messages_stay_alive_for_a_stream_other_than_that_of_the_start(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current stream of {device}")
    work, *messages = (mock.Mock(device="cuda:1", is_cuda=True) for _ in range(3))
    assert transfer._wait(work, *messages) is messages[1]
    work.wait.assert_called_once_with()
    for message in messages:
        message.record_stream.assert_called_once_with("current stream of cuda:1")


@on_ranks(3)
def test_different_arguments_raise_on_all_ranks(rank):
    """All ranks raise for each kind of difference, and the next call works."""
    last, x = rank == 2, torch.randn(3, 16)
    dtype, density = (torch.bfloat16, 0.5) if last else (torch.float32, 0.25)
    quantized = "int4" if last else RowFormat("int4", backward="sign")
    dense = "float32" if last else RowFormat(density=0.5)

    def all_to_all(x, format):
        return all_to_all_rows(x, [1, 1, 1], format=format)

    def all_gather(x, format):
        return all_gather_rows(x, format=format)

    both = (
        (x, quantized, "format", "int4, sign", "int4"),
        (x, dense, "density", 0.5, None),
        (x, RowFormat(density=density), "density", 0.25, 0.5),
        (x.to(dtype), HALF, "format", "float32", "bfloat16"),
        (x.clone().requires_grad_(last), HALF, "requires_grad", False, True),
    )
    widths = (
        (x[:, : 16 if last else 8], HALF, "d", 8, 16),
        (x[:, : 8 * (rank < 2)], HALF, "d", 8, 0),
    )
    for exchange, cases in (
        (all_to_all, both + widths),
        (all_gather, (*both, (x[: 3 * (rank < 2)], HALF, "B", 3, 0))),
    ):
        for given, format, name, first, second in cases:
            with pytest.raises(ValueError) as error:
                exchange(given, format)
            got = f"{first} on rank 0, {first} on rank 1, {second} on rank 2"
            rule = f"{name} must be the same on every rank, got {got}"
            assert str(error.value) == f"dct::{exchange.__name__}_rows: {rule}"
        exchange(x, HALF)
    with pytest.raises(ValueError, match=re.escape("widths[2] must be in [1, ")):
        all_gather(x[:, : 8 * (rank < 2)], HALF)


@on_ranks(1)
def test_errors_name_the_argument(rank):
    x = torch.randn(4, 8)
    for function, given, error, text in [
        (all_to_all_rows, (x, [2, 2]), ValueError, "splits must have 1 elements"),
        (all_to_all_rows, (x, [3]), ValueError, "x must have 3 rows like"),
        (all_to_all_rows, (x[0], [4]), ValueError, "x must be 2-D, got 1-D"),
        (all_to_all_rows, (x, [-4]), ValueError, "splits[0] must be in [0, "),
        (all_to_all_rows, (x, [4], [1, 3]), ValueError, "output_splits must have"),
        (all_to_all_rows, (x[:, :0], [4]), ValueError, "x must have at least 1 column"),
        (all_gather_rows, (x, [9]), ValueError, "x must have width 9 like widths, got 8"),
        (all_gather_rows, (x, [8, 8]), ValueError, "widths must have 1 elements"),
        (all_gather_rows, (x[:, :0],), ValueError, "widths[0] must be in [1, "),
    ]:
        for format in (ALL, "int8"):
            with pytest.raises(error, match=re.escape(text)):
                function(*given, format=format)


@on_ranks(1)
def test_autograd_graph_does_not_keep_its_group(rank):
    """If a group existed until the process exits, its threads would abort the process."""
    group = dist.new_group([0])
    x = torch.randn(3, 8, requires_grad=True)
    for exchange in (
        lambda group: all_to_all_rows(x, [3], format=HALF, group=group),
        lambda group: all_gather_rows(x, format=HALF, group=group),
    ):
        exchange(group).sum().backward()
    kept, y = weakref.ref(group), exchange(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="must exist until the backward pass"):
        y.sum().backward()
