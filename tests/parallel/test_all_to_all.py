"""all_to_all_rows: what arrives, what comes back, and how many bytes cross."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import rows as oracle
from torch import nn

from dct_parallel import RowFormat, all_to_all_rows
from dct_parallel.rows.packing import row_k
from ranks import on_ranks
from wire_meter import WireMeter

ALL = RowFormat(density=1.0)
HALF = RowFormat(density=0.5)
TENTH = RowFormat(density=0.1)

WIDTH = 40
TABLE_BYTES = 40  # to every other rank: how many rows, and four settings


def _splits(source, ranks):
    """Rows that a rank sends to each: uneven; the last but one sends and receives none."""
    idle = ranks - 2
    return [0 if idle in (source, r) else 1 + (3 * source + 2 * r) % 5 for r in range(ranks)]


def _rows(source, ranks, width=WIDTH, dtype=torch.float32):
    generator = torch.Generator().manual_seed(source)
    return torch.randn(sum(_splits(source, ranks)), width, generator=generator).to(dtype)


def _weights(rank, ranks, width=WIDTH):
    """What a rank multiplies its received rows with: gradients differ between all rows."""
    received = sum(_splits(source, ranks)[rank] for source in range(ranks))
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(received, width, generator=generator)


def _masked(x, k):
    """x without what is not sent, and the mask, in float64."""
    mask = torch.zeros(x.shape, dtype=torch.float64)
    for row, values in zip(mask, x.numpy(), strict=True):
        row[oracle.largest(np.asarray(values), k)] = 1
    return mask * x.double(), mask


def _from_everyone(parts_of, rank, ranks):
    """The rows that rank gets, in order of their source."""
    parts = [parts_of(source).split(_splits(source, ranks))[rank] for source in range(ranks)]
    return torch.cat(parts)


def _to_everyone(parts_of, rank, ranks):
    """The gradients that rank gets back, in order of the rows it sent."""
    into = [[_splits(source, ranks)[r] for source in range(ranks)] for r in range(ranks)]
    return torch.cat([parts_of(r).split(into[r])[rank] for r in range(ranks)])


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks("world_size")
def test_values_gradients_and_bytes(rank):
    ranks = dist.get_world_size()
    splits = _splits(rank, ranks)
    output_splits = [_splits(source, ranks)[rank] for source in range(ranks)]
    elsewhere = sum(splits) - splits[rank], sum(output_splits) - output_splits[rank]
    for density in (0.01, 0.1, 0.5, 1.0):
        for known in (None, output_splits):
            k = row_k(WIDTH, density)
            x = _rows(rank, ranks).requires_grad_()
            weight = _weights(rank, ranks)
            with WireMeter() as meter:
                y = all_to_all_rows(x, splits, known, format=RowFormat(density=density))
                forward = meter.take()
                (weight * y**2).sum().backward()
                backward = meter.take()

            expected = _from_everyone(lambda s, k=k: _masked(_rows(s, ranks), k)[0], rank, ranks)
            assert y.dtype == x.dtype and torch.equal(y.double(), expected)
            sent, mask = _masked(x.detach(), k)
            returned = _to_everyone(lambda r: _weights(r, ranks).double(), rank, ranks)
            assert torch.allclose(x.grad.double(), 2 * returned * mask * sent)

            positions = oracle.encoding(WIDTH, k)[1]
            table = 0 if known else TABLE_BYTES * (ranks - 1)
            assert forward == table + elsewhere[0] * (4 * k + positions)
            assert backward == elsewhere[1] * 4 * k  # values alone


@on_ranks(2)
def test_format(rank):
    """bfloat16 on the wire, both ways; the rows and their gradients stay float32."""
    x = (torch.randn(6, WIDTH) + rank).requires_grad_()
    with WireMeter() as meter:
        y = all_to_all_rows(x, [3, 3], format=RowFormat(torch.bfloat16, density=0.1))
        assert meter.take() == TABLE_BYTES + 3 * (2 * 4 + 4)  # uint8 columns
        y.backward(torch.full((6, WIDTH), 1 / 3))
        assert meter.take() == 3 * 2 * 4
    assert y.dtype == x.grad.dtype == torch.float32
    assert torch.equal(y, y.bfloat16().float()) and not torch.equal(y, torch.zeros_like(y))
    assert set(x.grad.unique().tolist()) == {0.0, torch.tensor(1 / 3).bfloat16().item()}


class _Dense(torch.autograd.Function):
    """The uncompressed exchange."""

    @staticmethod
    def forward(ctx, x, splits, output_splits):
        ctx.splits, ctx.output_splits = splits, output_splits
        y = x.new_empty(sum(output_splits), x.shape[1])
        dist.all_to_all_single(y, x, output_splits, splits)
        return y

    @staticmethod
    def backward(ctx, grad):
        x = grad.new_empty(sum(ctx.splits), grad.shape[1])
        dist.all_to_all_single(x, grad.contiguous(), ctx.splits, ctx.output_splits)
        return x, None, None


def _trained(rank, exchange, dtype):
    """A table owned by each rank, looked up for all; a head on each rank's own samples."""
    ranks = dist.get_world_size()
    torch.manual_seed(rank)
    table = nn.Embedding(50, WIDTH, dtype=dtype)
    head = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], 0.1)
    batches = [2 + (rank_ + 1) % 3 for rank_ in range(ranks)]
    for _ in range(8):
        ids = torch.randint(50, (sum(batches),))
        received = exchange(table(ids), batches, [batches[rank]] * ranks)
        pooled = received.view(ranks, batches[rank], WIDTH).sum(0)
        optimizer.zero_grad()
        (head(pooled) - 1).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in (*table.parameters(), *head.parameters())])


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks("world_size")
def test_at_density_1_training_is_the_same_bit_for_bit(rank):
    for dtype in (torch.float32, torch.bfloat16):
        dense = _trained(rank, _Dense.apply, dtype)
        packed = _trained(rank, lambda x, s, o: all_to_all_rows(x, s, o, format=ALL), dtype)
        few = _trained(rank, lambda x, s, o: all_to_all_rows(x, s, o, format=TENTH), dtype)
        assert torch.equal(packed, dense) and not torch.equal(few, dense)
        assert few.isfinite().all()


@on_ranks(2)
def test_corners(rank):
    one = all_to_all_rows(torch.tensor([[5.0 + rank], [7.0 + rank]]), [1, 1], format=HALF)
    assert one.tolist() == [[5.0 + rank * 2], [6.0 + rank * 2]]  # d = 1
    none = torch.zeros(0, 8, requires_grad=True)
    y = all_to_all_rows(none, [0, 0], format=HALF)
    y.sum().backward()
    assert y.shape == none.grad.shape == (0, 8)
    x = torch.randn(8, 4).t()  # not contiguous; and only rank 0 has rows
    sent = x if rank == 0 else x[:0]
    assert torch.equal(
        all_to_all_rows(sent, [1, 3] if rank == 0 else [0, 0], format=ALL),
        all_to_all_rows(sent.contiguous(), [1, 3] if rank == 0 else [0, 0], format=ALL),
    )
    reversed_group = dist.new_group([1])
    if rank == 1:
        alone = torch.randn(3, 8)
        assert torch.equal(all_to_all_rows(alone, [3], format=ALL, group=reversed_group), alone)
