"""Copies of rows and layers: they train apart, in the group that they share."""

import copy
import io
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dct_embeddings import (
    DynamicFeatureRows,
    EquivalentSubstitution,
    FeatureRows,
    FirstLayer,
    LinearTerms,
    RowWiseAdagrad,
)
from ranks import on_ranks, through_a_file

F64 = torch.float64
WEIGHT = torch.arange(30, dtype=F64).view(10, 3) / 7
FIRST = torch.arange(12, dtype=F64).view(2, 6) / 5 - 1  # of 2 outputs and 2 fields of 3 numbers
LENGTHS = torch.tensor([[2, 0], [1, 1]])


def _layer(**settings):
    operators = [LinearTerms(), FirstLayer(2, 3, 2).double()]
    layer = EquivalentSubstitution(FeatureRows(WEIGHT), operators, **settings)
    layer.operators[1].weight.data.copy_(FIRST)
    return layer


def _ids(rank):
    return torch.tensor([3, 4, 9, 0]) if rank == 0 else torch.tensor([1, 3, 3, 8])


def _expected(weight, first, rank):
    """By the definition: samples have bags (a, b), c and none, d."""
    a, b, c, d = weight[_ids(rank)]
    pooled = torch.stack([torch.cat([a + b, c]), torch.cat([0 * d, d])])
    linear = torch.stack([(a + b + c)[0], d[0]])
    return linear, pooled @ first.T


def _same(results, expected):
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right)


def _trained(layer, optimizer, rank):
    optimizer.zero_grad()
    sum(result.square().sum() for result in layer(_ids(rank), LENGTHS)).backward()
    optimizer.step()


def _alone(steps):
    """Weights after so many steps of one process with the samples of both ranks."""
    weight, first = nn.Parameter(WEIGHT.clone()), nn.Parameter(FIRST.clone())
    optimizer = torch.optim.SGD([weight, first], 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        losses = [_expected(weight, first, rank) for rank in range(2)]
        (sum(part.square().sum() for both in losses for part in both) / 2).backward()
        optimizer.step()
    return weight.detach(), first.detach()


@on_ranks(2)
def test_a_copy_trains_apart(rank):
    layer = _layer(ids_group=dist.new_group())
    apart = nn.Sequential(layer)
    apart = copy.deepcopy(apart)[0]
    assert apart.rows.group is layer.rows.group is dist.group.WORLD
    optimizer = torch.optim.SGD(apart.parameters(), 0.01)
    for steps in range(1, 3):
        _trained(apart, optimizer, rank)
        _same(apart(_ids(rank), LENGTHS), _expected(*_alone(steps), rank))
        _same(layer(_ids(rank), LENGTHS), _expected(WEIGHT, FIRST, rank))
    layer.load_state_dict(apart.state_dict())
    _same(layer(_ids(rank), LENGTHS), _expected(*_alone(2), rank))
    # The copy knows whose rows it has by itself.
    state = copy.deepcopy(apart.rows.state_dict())
    apart.rows.owner += 1
    with pytest.raises(ValueError, match="owner of the state must be"):
        apart.rows.load_state_dict(state)
    layer.rows.load_state_dict(state)


@on_ranks(2)
def test_averaged_model(rank):
    layer = _layer()
    mean = AveragedModel(layer)
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    for _ in range(3):
        _trained(layer, optimizer, rank)
        mean.update_parameters(layer)
    every = [_alone(steps) for steps in range(1, 4)]
    weights = [torch.stack(part).mean(0) for part in zip(*every, strict=True)]
    mean.eval()
    with torch.no_grad():
        _same(mean(_ids(rank), LENGTHS), _expected(*weights, rank))


def _gathered(ids):
    parts = [None] * 2
    dist.all_gather_object(parts, ids.tolist())
    return sorted(id_ for part in parts for id_ in part)


@on_ranks(2)
def test_copies_of_dynamic_rows(rank):
    """A copy has the features of then; later ones are each one's own, and so is the optimizer."""
    rows = DynamicFeatureRows(1, 20, bound=1.0, dtype=F64)
    optimizer = RowWiseAdagrad([rows.weight])
    rows.attach("sum", optimizer, "sum")
    layer = EquivalentSubstitution(rows, [LinearTerms()])

    def look_up(of, *ids):
        (result,) = of(torch.tensor(ids), torch.ones(1, len(ids), dtype=torch.int64))
        result.sum().backward()
        return result.detach()

    before = look_up(layer, 1, 2, 3)
    apart, mean = copy.deepcopy(layer), AveragedModel(layer).eval()
    for _ in range(2):
        optimizer.step()
        mean.update_parameters(layer)
    assert torch.equal(look_up(apart, 1, 2, 3), before)
    first = _gathered(rows.ids())
    look_up(layer, 4, 5)
    look_up(apart, 6)
    assert _gathered(rows.ids()) == [*first, 4, 5] and _gathered(apart.rows.ids()) == [*first, 6]
    assert apart.rows.state_dict().keys() == {"owner", "ids", "weight"}
    assert "per_row.sum" in rows.state_dict()
    mean.update_parameters(layer)
    known = look_up(mean, 1, 2, 3, 4)
    assert known[:3].all() and not known[3]
    # Both steps' gradients are 1 for every row, and the second divides by another root.
    roots = torch.tensor([1.0, 2.0], dtype=F64).sqrt() + 1e-8
    moved = (0.01 / roots).cumsum(0)
    torch.testing.assert_close(known[:3], before - (moved[0] + 2 * moved[1]) / 3)


@on_ranks(1)
def test_whole_modules_are_not_saved(rank):
    """Whole modules are refused, before a file could be read in a process without the group."""
    layer = _layer()
    for module, name in (
        (layer.rows, "FeatureRows"),
        (DynamicFeatureRows(1, 5), "DynamicFeatureRows"),
        (layer, "FeatureRows"),
        (AveragedModel(nn.Sequential(layer)), "FeatureRows"),
    ):
        text = f"dct::{name}: the saved object must be a state_dict(), got the module itself, "
        with pytest.raises(TypeError, match=re.escape(text)):
            torch.save(module, io.BytesIO())
        copy.deepcopy(module).load_state_dict(through_a_file(module.state_dict()))
