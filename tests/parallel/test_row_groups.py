"""all_to_all_rows and all_gather_rows in a group of some ranks, numbered otherwise there."""

import pytest
import torch
import torch.distributed as dist

from dct_parallel import RowFormat, all_gather_rows, all_to_all_rows
from ranks import on_ranks

ALL = RowFormat(density=1.0)

WIDTH = 4
SPLITS = [1, 2]  # rows for the group's first rank and its second


def _sent(g):
    """Three rows of rank g of the group, all values different."""
    return (100 * g + torch.arange(3.0 * WIDTH)).view(3, WIDTH)


def _weight(g, shape):
    return (torch.arange(float(shape.numel())) + 1000 * (g + 1)).view(shape)


@on_ranks(3)
def test_values_and_gradients_in_a_group_of_some_ranks(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        for function in (
            lambda: all_to_all_rows(_sent(0), SPLITS, format=ALL, group=group),
            lambda: all_gather_rows(_sent(0), format=ALL, group=group),
        ):
            with pytest.raises(ValueError, match="group must be a process group that this rank is"):
                function()
        return
    g = dist.get_rank(group)
    x = _sent(g).requires_grad_()
    y = all_to_all_rows(x, SPLITS, format=ALL, group=group)
    assert torch.equal(y, torch.cat([_sent(source).split(SPLITS)[g] for source in (0, 1)]))
    (y * _weight(g, y.shape)).sum().backward()
    received = [torch.Size([2 * rows, WIDTH]) for rows in SPLITS]  # by the first and the second
    returned = [_weight(r, received[r]).split([SPLITS[r]] * 2)[g] for r in (0, 1)]
    assert torch.equal(x.grad, torch.cat(returned))

    widths = [3, WIDTH]
    parts = [_sent(r)[:, :width] for r, width in enumerate(widths)]
    x = parts[g].clone().requires_grad_()
    y = all_gather_rows(x, format=ALL, group=group)
    assert torch.equal(y, torch.cat(parts, 1))
    (y * _weight(g, y.shape)).sum().backward()
    total = sum(_weight(r, y.shape).split(widths, 1)[g] for r in (0, 1))
    assert torch.equal(x.grad, total)


@on_ranks(2)
def test_under_no_grad_ranks_may_differ_in_what_requires_a_gradient(rank):
    """Under no_grad nothing comes back, whatever the inputs require."""
    x = _sent(rank).requires_grad_(rank == 0)
    with torch.no_grad():
        y = all_to_all_rows(x, SPLITS, format=ALL)
        whole = all_gather_rows(x, format=ALL)
    assert not y.requires_grad and not whole.requires_grad
    assert torch.equal(whole, torch.cat([_sent(0), _sent(1)], 1))


@pytest.mark.parametrize("function", [all_to_all_rows, all_gather_rows])
def test_without_a_process_group(function):
    with pytest.raises(ValueError, match="group must be a process group where torch"):
        function(_sent(0), SPLITS, format=ALL)
