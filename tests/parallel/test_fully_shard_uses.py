"""dct_fully_shard_hook: order and reuse of modules, nested backward passes, and invalid calls."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from dct_parallel import dct_fully_shard_hook, groups
from support.ranks import batch, mlp, on_ranks, shard_mesh


class Twice(nn.Module):
    """Two layers. `flipped` swaps their order."""

    def __init__(self, mesh, same_size):
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(32, 32, bias=bias) for bias in (True, same_size))
        self.a, self.b = (fully_shard(layer, mesh=mesh["shard"]) for layer in layers)

    def forward(self, x, flipped):
        return self.a(self.b(x)) if flipped else self.b(self.a(x))


@pytest.mark.parametrize("same_size", [True, False])
@on_ranks(2)
def test_different_order_of_modules_raises(rank, same_size):
    mesh = shard_mesh(2, 1)
    x, _ = batch(0, rank, width=32)
    for start_step in (0, 2):  # the second step is compressed, or dense
        model = Twice(mesh, same_size)
        state = dct_fully_shard_hook(model, mesh=mesh, density=0.1, start_step=start_step)
        model(x, flipped=False).sum().backward()
        assert state.stats()["step"] == 1  # although the layers have no common root
        with pytest.raises(RuntimeError, match="every rank must run the same modules in the same"):
            model(x, flipped=rank == 1).sum().backward()


@on_ranks(2)
def test_module_used_twice(rank):
    """The gradients of both uses of a layer are added."""
    mesh = shard_mesh(2, 1)
    layer = fully_shard(nn.Linear(32, 32, bias=False), mesh=mesh["shard"])
    state = dct_fully_shard_hook(layer, mesh=mesh, density=1.0, format=torch.float32, start_step=0)
    x, _ = batch(0, rank, width=32)
    (layer(x).sum() + layer(2 * x).sum()).backward()
    expected = sum(3 * batch(0, r, width=32)[0].sum(0) for r in range(2)) / 2
    grad = layer.weight.grad.full_tensor()
    torch.testing.assert_close(grad, expected.expand(32, 32), rtol=1e-5, atol=1e-5)
    assert state.stats()["step"] >= 1


class Checkpointed(nn.Module):
    """Separately sharded layers with activation checkpointing."""

    def __init__(self, mesh, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            fully_shard(nn.Linear(32, 32), mesh=mesh["shard"]) for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("save", [False, True])
@on_ranks(2)
def test_nested_backward_pass_is_not_a_step(rank, save):
    mesh = shard_mesh(2, 1)
    results, compared, read = [], [], []
    compare = groups.compare_order

    def compare_order(op, order, group):
        compared.append(order)
        require_same = compare(op, order, group)
        return lambda: read.append(order) or require_same()

    groups.compare_order = compare_order
    for use_reentrant in (False, True):
        model = fully_shard(Checkpointed(mesh, use_reentrant), mesh=mesh["shard"])
        state = dct_fully_shard_hook(model, mesh=mesh, density=0.1, start_step=1)
        for step in range(4):
            x, _ = batch(step, rank, width=32)
            model(x.requires_grad_()).square().sum().backward()
            if save:
                state.state_dict()
        assert state.stats()["step"] == 4
        assert len(read) == len(compared) - (not save)  # the next step reads the last comparison
        state.take_back()
        assert [order for order in compared if len(order) == 3] == [[2, 1, 0]] * 4
        assert sorted(read) == sorted(compared)
        assert compared[:3] == [[1, 2], [1, 1], [1, 0]]  # (step, module), before each exchange
        compared.clear()
        read.clear()
        results.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _wrapped(mesh):
    return fully_shard(mlp(depth=1), mesh=mesh["shard"])


@on_ranks(2)
def test_unsupported_models_and_arguments_raise(rank):
    mesh = shard_mesh(2, 1)

    def refuses(error, text, model, given=mesh, **options):
        with pytest.raises(error, match=text):
            dct_fully_shard_hook(model, mesh=given, **options)

    refuses(TypeError, "model must be a module that fully_shard was applied to", mlp())
    # torch would reduce densely over both dimensions before it calls the hook.
    native = fully_shard(mlp(depth=1), mesh=mesh)
    text = r'parameter 0.weight must be wrapped by fully_shard\(module, mesh=mesh\["shard"\]\)'
    refuses(ValueError, text, native)
    loose = nn.Sequential(fully_shard(nn.Linear(3, 3), mesh=mesh["shard"]), nn.Linear(3, 1))
    text = "every parameter must be sharded by fully_shard, got 1.weight, 1.bias"
    refuses(ValueError, text, loose)
    with torch.device("meta"):
        empty = fully_shard(nn.Linear(3, 3), mesh=mesh["shard"])
    refuses(ValueError, "parameter weight must be on a device", empty)
    frozen = _wrapped(mesh).requires_grad_(False)
    refuses(ValueError, "model must have parameters that require grad", frozen)
    hooked = _wrapped(mesh)
    hooked.set_all_reduce_hook(lambda flat: None)
    refuses(ValueError, r"model must have no all-reduce hook on module \(root\)", hooked)

    if hasattr(_fsdp_common, "ShardPlacementResult"):  # from torch 2.13
        other = _fsdp_common.FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0)
        elsewhere = _fsdp_common.ShardPlacementResult(Shard(0), other)
        several = fully_shard(
            mlp(depth=1),
            mesh=mesh["shard"],
            shard_placement_fn=lambda p: elsewhere if p.ndim == 1 else None,
        )
        text = r"one parameter group in module \(root\) .*, got 2"
        refuses(ValueError, text, several)

    model = _wrapped(mesh)
    refuses(ValueError, r"mesh must have dimensions \('replicate', 'shard'\)", model, mesh["shard"])
    text = r"density must be the same on every rank, got 0.1 on rank 0, 0.2 on rank 1"
    refuses(ValueError, text, model, density=0.1 * (rank + 1))

    state = dct_fully_shard_hook(model, mesh=mesh, density=0.1)  # no failed call left a hook
    model[2].bias.requires_grad_(False)
    text = r"gradient must have 4225 elements, of all .* module \(root\) .*, got 4224"
    with pytest.raises(ValueError, match=text):
        model(torch.ones(1, 64)).sum().backward()
    state.close()
