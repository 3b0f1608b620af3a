"""all_gather_rows: the parts of a row side by side, their gradients summed at the owner."""

import re
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import rows as oracle
from torch import nn

from dct_parallel import RowFormat, all_gather_rows
from dct_parallel.rows.packing import row_k
from ranks import on_ranks, run_ranks
from wire_meter import WireMeter

ALL = RowFormat(density=1.0)
HALF = RowFormat(density=0.5)
TENTH = RowFormat(density=0.1)

ROWS = 6
TABLE_BYTES = 40  # to every other rank: its width, and four settings


def _part(rank, width):
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(rank))


def _weight(rank, widths):
    """The gradient of this rank's loss to the gathered rows, all different."""
    return torch.randn(ROWS, sum(widths), generator=torch.Generator().manual_seed(50 + rank))


def _mask(x, k):
    mask = torch.zeros(x.shape)
    for row, values in zip(mask, x.numpy(), strict=True):
        row[oracle.largest(np.asarray(values), k)] = 1
    return mask


def _against_the_oracle(rank, widths):
    for density, format in product((0.01, 0.1, 1.0), (torch.float32, torch.bfloat16)):
        _is_the_oracles(rank, widths, density, format)


def _is_the_oracles(rank, widths, density, format):
    ranks = dist.get_world_size()
    ks = [row_k(width, density) for width in widths]
    parts = [_part(r, width) for r, width in enumerate(widths)]
    masks = [_mask(part, k) for part, k in zip(parts, ks, strict=True)]
    for known in (None, widths):
        x = _part(rank, widths[rank]).requires_grad_()
        with WireMeter() as meter:
            y = all_gather_rows(x, known, format=RowFormat(format, density=density))
            forward = meter.take()
            (y * _weight(rank, widths)).sum().backward()
            backward = meter.take()

        sent = [part.to(format).float() * m for part, m in zip(parts, masks, strict=True)]
        assert torch.equal(y, torch.cat(sent, 1))
        # In rank order, in float32: the same bits, not merely close.
        total = torch.zeros(ROWS, widths[rank])
        for r in range(ranks):
            total += _weight(r, widths).split(widths, 1)[rank].to(format).float()
        assert torch.equal(x.grad, total * masks[rank])

        size, encoded = format.itemsize, oracle.encoding
        longest = max(size * k + encoded(d, k)[1] for d, k in zip(widths, ks, strict=True))
        table = 0 if known else TABLE_BYTES * (ranks - 1)
        assert forward == table + (ranks - 1) * ROWS * longest
        assert backward == ROWS * size * (sum(ks) - ks[rank])  # values alone


@pytest.mark.parametrize("widths", [[40, 40], [1, 300], [16, 40, 1, 9]], ids=str)
def test_values_gradients_and_bytes(widths):
    run_ranks(_against_the_oracle, len(widths), widths)


class _Dense(torch.autograd.Function):
    """The uncompressed all-gather; its gradient is summed in rank order, too."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        parts = [part.contiguous() for part in grad.chunk(dist.get_world_size(), 1)]
        received = torch.empty_like(torch.stack(parts))
        dist.all_to_all_single(received, torch.stack(parts))
        total = torch.zeros_like(received[0])
        for part in received:
            total += part
        return total


def _trained(rank, gather):
    torch.manual_seed(rank)
    first, second = nn.Linear(10, 24), nn.Linear(24 * dist.get_world_size(), 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.05)
    for step in range(8):
        x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (second(gather(first(x)).tanh()) - 1).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in (*first.parameters(), *second.parameters())])


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks("world_size")
def test_at_density_1_training_is_the_same_bit_for_bit(rank):
    dense = _trained(rank, _Dense.apply)
    assert torch.equal(_trained(rank, lambda x: all_gather_rows(x, format=ALL)), dense)
    assert not torch.equal(_trained(rank, lambda x: all_gather_rows(x, format=TENTH)), dense)


@on_ranks(2)
def test_corners(rank):
    none = torch.zeros(0, 8, requires_grad=True)
    y = all_gather_rows(none, format=HALF)
    y.sum().backward()
    assert y.shape == (0, 16) and none.grad.shape == (0, 8)
    x = torch.randn(8, 3).t()  # not contiguous
    y = all_gather_rows(x, format=ALL)
    assert torch.equal(y[:, 8 * rank : 8 * rank + 8], x)
    alone = dist.new_group([1])
    if rank == 1:
        assert torch.equal(all_gather_rows(x, format=ALL, group=alone), x)


@on_ranks(3)
def test_ranks_that_disagree_all_fail_and_name_all_values(rank):
    last, x = rank == 2, torch.randn(4, 8)
    dtype, density = (torch.bfloat16, 0.5) if last else (torch.float32, 0.25)
    few_bits = "int4" if last else RowFormat("int4", backward="sign")
    whole = "float32" if last else RowFormat(density=0.5)
    for given, format, name, told, others in (
        (x, few_bits, "format", "int4, sign", "int4"),
        (x, whole, "density", 0.5, None),
        (x[: 0 if last else 4], HALF, "B", 4, 0),
        (x, RowFormat(density=density), "density", 0.25, 0.5),
        (x.to(dtype), HALF, "format", "float32", "bfloat16"),
        (x.clone().requires_grad_(last), HALF, "requires_grad", False, True),
    ):
        with pytest.raises(ValueError) as error:
            all_gather_rows(given, format=format)
        got = f"{told} on rank 0, {told} on rank 1, {others} on rank 2"
        rule = f"{name} must be the same on every rank, got {got}"
        assert str(error.value) == f"dct::all_gather_rows: {rule}"
    with pytest.raises(ValueError, match=re.escape("widths[2] must be in [1, ")):
        all_gather_rows(torch.randn(4, 0 if last else 8), format=HALF)
    all_gather_rows(torch.randn(4, 8), format=HALF)


@on_ranks(1)
def test_errors_name_the_argument(rank):
    x = torch.randn(4, 8)
    for call, error, text in [
        (lambda: all_gather_rows(x, [9], format=ALL), ValueError, "x must have width 9 like"),
        (lambda: all_gather_rows(x, [8, 8], format=ALL), ValueError, "widths must have 1 elements"),
        (lambda: all_gather_rows(x[0], format=ALL), ValueError, "x must be 2-D, got 1-D"),
        (lambda: all_gather_rows(x.double(), format=ALL), TypeError, "x must be float32"),
        (lambda: all_gather_rows(x[:, :0], format=ALL), ValueError, "widths[0] must be in [1, "),
    ]:
        with pytest.raises(error, match=re.escape(text)):
            call()
