"""A wrong state raises and changes nothing, in all modules and optimizers for embeddings."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from dct_embeddings import (
    DynamicFeatureRows,
    EquivalentSubstitution,
    FeatureRows,
    FirstLayer,
    MomentumScaledRowWiseAdagrad,
    RowWiseAdagrad,
    ShardedEmbeddingBags,
    plan_shards,
)
from support.ranks import on_ranks, shard_mesh


def _damages(tensor):
    yield "plain dense tensor", tensor.to("meta")
    yield "plain dense tensor", tensor.to_sparse()
    yield "plain dense tensor", tensor.reshape(1, -1).to_sparse_csr()
    quantized = torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)
    yield "plain dense tensor", quantized
    yield "plain dense tensor", torch.nested.nested_tensor([tensor])
    mesh = init_device_mesh("cpu", (1,))
    yield "plain dense tensor", distribute_tensor(tensor, mesh, [Replicate()])
    yield "must be a tensor, got ndarray", tensor.numpy()
    yield "must be a tensor, got None", None
    yield r"must|\[n\], got (torch.)?complex64", tensor.to(torch.complex64)
    yield "must", torch.cat([tensor, tensor[:1]])
    yield "must", tensor.reshape(1, *tensor.shape)


def _paths(state, path=()):
    """The path of every tensor in a dict of dicts."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield (*path, key)
        elif isinstance(value, dict):
            yield from _paths(value, (*path, key))


def _get(state, path):
    return _get(state[path[0]], path[1:]) if path else state


def _put(state, path, value):
    return {**state, path[0]: _put(state[path[0]], path[1:], value)} if path else value


def _trained_layer(seed):
    """A layer of dynamic rows with its optimizer attached, after one step."""
    torch.manual_seed(seed)
    rows = DynamicFeatureRows(3, 20)
    layer = EquivalentSubstitution(rows, [FirstLayer(1, 3, 2)])
    optimizer = RowWiseAdagrad([rows.weight])
    rows.attach("sum", optimizer, "sum")
    ids = torch.arange(4) + seed
    layer(ids, torch.ones(1, 4, dtype=torch.int64))[0].sum().backward()
    optimizer.step()
    return layer


def _layer(seed):
    torch.manual_seed(seed)
    operators = [FirstLayer(1, 3, 2), FirstLayer(1, 3, 4)]
    return EquivalentSubstitution(FeatureRows(torch.randn(9, 3)), operators)


def _rows(seed):
    return _layer(seed).rows


def _bags(seed):
    torch.manual_seed(seed)
    tables = [torch.randn(5, 3), torch.randn(4, 3)]
    return ShardedEmbeddingBags(tables, plan_shards([5, 4], 1), shard_mesh(1, 1))


def _optimizer(seed):
    torch.manual_seed(seed)
    weights = [nn.Parameter(torch.randn(rows, 3)) for rows in (4, 5)]
    optimizer = MomentumScaledRowWiseAdagrad(weights, scale=2, delayed=True)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", [_trained_layer, _layer, _bags, _optimizer, _rows])
@on_ranks(1)
def test_a_refused_state_changes_nothing(rank, make):
    warnings.simplefilter("ignore")  # torch warns about CSR and nested tensors
    loader, other = make(0), make(7)
    state = copy.deepcopy(other.state_dict())
    before = copy.deepcopy(loader.state_dict())
    refused = 0

    def refuses(damaged, text):
        with pytest.raises((ValueError, TypeError), match=f"dct::.*({text})"):
            loader.load_state_dict(damaged)

    for path in _paths(state):
        for text, value in _damages(_get(state, path)):
            refuses(_put(state, path, value), text)
            refused += 1
        *outer, name = path
        without = {key: value for key, value in _get(state, outer).items() if key != name}
        refuses(_put(state, outer, without), f"got no.*{name}|{name}.*got None")
    refuses([1], "state must be a .*, got list")
    if isinstance(loader, nn.Module):
        refuses({**state, "more": torch.ones(1)}, "got also more")
        nested = {f"0.{name}": value for name, value in state.items()}
        with pytest.raises(TypeError, match="must be a plain dense tensor"):
            nn.Sequential(loader).load_state_dict({**nested, f"0.{name}": state[name].to("meta")})
    assert refused > 20
    now = loader.state_dict()
    assert all(torch.equal(_get(now, path), _get(before, path)) for path in _paths(before))
    loader.load_state_dict(state)
    now = loader.state_dict()
    assert all(torch.equal(_get(now, path), _get(state, path)) for path in _paths(state))


def test_settings_in_a_state_are_checked():
    optimizer = _optimizer(0)
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    for change, text in (
        ({"lr": -1.0}, "lr must be finite and above 0, got -1.0"),
        ({"params": [0]}, r"state must have groups of \[2\] weights, got \[1\]"),
    ):
        with pytest.raises(ValueError, match=f"dct::MomentumScaledRowWiseAdagrad: {text}"):
            optimizer.load_state_dict({**saved, "param_groups": [{**group, **change}]})
    with pytest.raises(TypeError, match=r"state\[0\] must be a dict, got 5"):
        optimizer.load_state_dict({**saved, "state": {0: 5}})
    less = {name: value for name, value in group.items() if name != "scale"}
    with pytest.raises(ValueError, match=r"param_groups\[0\] must have .*, got no scale"):
        optimizer.load_state_dict({**saved, "param_groups": [less]})
    assert optimizer.param_groups[0]["lr"] == group["lr"]
