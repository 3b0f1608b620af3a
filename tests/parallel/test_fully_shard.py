"""dct_fully_shard_hook: FSDP2 inside a shard group, compressed exchange between replicas.

Most meshes have 2 replicas of 2 shards. Rank r holds shard r % 2 of replica r // 2.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from dct_kernels import quantized_payload_bytes
from dct_parallel import dct_fully_shard_hook, groups
from support.ranks import assert_same, batch, mlp, on_ranks, refused, shard_mesh, train_step


def _wrap(model, mesh, **options):
    """Apply fully_shard to each layer with parameters and to the model."""
    for module in model.children():
        if any(True for _ in module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh["shard"], **options)
    return fully_shard(model, mesh=mesh["shard"], **options)


def _weights(model):
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def _uneven():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 3), nn.Tanh(), nn.Linear(3, 1))


def _mean_gradients(model, batches):
    """Return the gradients of an unsharded model, averaged over all batches."""
    losses = [(model(x) - y).square().mean() for x, y in batches]
    return torch.autograd.grad(sum(losses) / len(losses), list(model.parameters()))


# (reduce_dtype, accumulated passes, divide factor of the shard group, sharded dimension)
VARIANTS = {
    "float32": (None, 1, None, 0),
    "bfloat16": (torch.bfloat16, 1, None, 0),
    "accumulated": (None, 3, None, 0),
    "divided": (None, 1, 8.0, 0),
    "columns": (None, 1, None, 1),
}


@on_ranks(4)
def test_density_1_is_the_dense_mean(rank):
    mesh = shard_mesh()
    for variant, (dtype, passes, factor, dim) in VARIANTS.items():
        model = _wrap(
            _uneven(),
            mesh,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype),
            shard_placement_fn=lambda p, dim=dim: Shard(dim * (p.shape[-1] % 2 == 0)),
        )
        for module in model.modules() if factor is not None else ():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)
        state = dct_fully_shard_hook(
            model, mesh=mesh, density=1.0, format=torch.float32, start_step=0
        )
        for micro in range(passes):
            x, y = batch(micro, rank, width=8)
            model.set_requires_gradient_sync(micro == passes - 1)
            ((model(x) - y).square().mean() / passes).backward()
        assert state.stats()["step"] == 1
        batches = [batch(micro, r, width=8) for micro in range(passes) for r in range(4)]
        expected = _mean_gradients(_uneven(), batches)
        shards_mean = 1.0 if factor is None else 2 / factor
        # The reduce-scatter rounds its inputs and its sum to bfloat16.
        most = 3 * 2**-8 if variant == "bfloat16" else 1e-6
        for p, e in zip(model.parameters(), expected, strict=True):
            error = (p.grad.full_tensor() - shards_mean * e).abs().max()
            assert error < most * e.abs().max(), variant
        state.close()


@on_ranks(4)
def test_padding_of_uneven_shards_is_not_sent(rank):
    """The shards have 2 and 1 rows. Nothing is sent for a bias of 1 entry on one of the shards."""
    mesh = shard_mesh()
    for inputs, rows in ((4096, 3), (9, 1)):
        model = fully_shard(nn.Linear(inputs, rows), mesh=mesh["shard"])
        state = dct_fully_shard_hook(model, mesh=mesh, format="int4", start_step=0)
        (7 * model(torch.ones(1, inputs)).sum()).backward()
        own = rows - rows // 2 if rank % 2 == 0 else rows // 2
        nbytes = quantized_payload_bytes(own * (inputs + 1), "int4")
        assert state.stats()["wire_bytes"] == nbytes and f"{nbytes:,}" in state.plan()
        assert all((p.grad.full_tensor() == 7).all() for p in model.parameters())


@on_ranks(4)
def test_replicas_stay_bitwise_equal(rank):
    mesh = shard_mesh()
    model = _wrap(mlp(), mesh)
    state = dct_fully_shard_hook(model, mesh=mesh, density=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01)
    start = _weights(model)
    for step in range(8):
        if step < 3:
            assert state.parameter_stats() == {} and state.stats()["density"] is None
        train_step(model, optimizer, *batch(step, rank))
        if step < 2:  # dense, in bfloat16
            grads = torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
            assert grads.count_nonzero() > 0.9 * grads.numel()
            assert (grads.view(torch.int32) & 0xFFFF == 0).all()
    assert (_weights(model) != start).all()
    assert_same(_weights(model))
    stats = state.stats()
    assert stats["step"] == 8 and 0.02 < stats["density"] < 0.07
    (entry,) = state.state_dict()["replicas"].values()
    residuals = {n: p["residual"].to_local() for n, p in entry["parameters"].items()}
    found = state.parameter_stats()
    for name, residual in residuals.items():
        assert found[name]["residual_norm"] == pytest.approx(residual.norm().item(), rel=1e-5)
    plan = state.plan()
    rows = {line.split()[0]: line.split() for line in plan.splitlines()}
    assert "ranks: 2, buckets: 5, transport: all_gather" in plan
    # A rank holds half of a layer, so the capacity is 1.25 * 0.05 * 2080 = 130 entries.
    assert "\n0: 0.weight ... 0.bias" in plan and rows["0:"][-4:-1] == ["2", "2,080", "130"]
    assert rows["total"][-1] == f"{stats['wire_bytes']:,}"
    state.close()
    state.close()
    with pytest.raises(RuntimeError, match="state must be open, got a closed one"):
        train_step(model, optimizer, *batch(0, rank))


@on_ranks(2)
def test_accumulation_with_set_requires_all_reduce_raises(rank):
    mesh = shard_mesh(2, 1)
    model = _wrap(mlp(), mesh)
    dct_fully_shard_hook(model, mesh=mesh, density=0.05)
    model.set_requires_all_reduce(False)
    x, y = batch(0, rank)
    with pytest.raises(ValueError, match=r"gradients must be accumulated with set_requires_grad"):
        (model(x) - y).square().mean().backward()


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

    def refuses(text, model, given=mesh, **options):
        refused(text, lambda: dct_fully_shard_hook(model, mesh=given, **options))

    refuses("model must be a module that fully_shard was applied to", mlp())
    # torch would reduce densely over both dimensions before it calls the hook.
    native = fully_shard(mlp(depth=1), mesh=mesh)
    text = r'parameter 0.weight must be wrapped by fully_shard\(module, mesh=mesh\["shard"\]\)'
    refuses(text, native)
    loose = nn.Sequential(fully_shard(nn.Linear(3, 3), mesh=mesh["shard"]), nn.Linear(3, 1))
    text = "every parameter must be sharded by fully_shard, got 1.weight, 1.bias"
    refuses(text, loose)
    with torch.device("meta"):
        empty = fully_shard(nn.Linear(3, 3), mesh=mesh["shard"])
    refuses("parameter weight must be on a device", empty)
    frozen = _wrapped(mesh).requires_grad_(False)
    refuses("model must have parameters that require grad", frozen)
    hooked = _wrapped(mesh)
    hooked.set_all_reduce_hook(lambda flat: None)
    refuses(r"model must have no all-reduce hook on module \(root\)", hooked)

    if hasattr(_fsdp_common, "ShardPlacementResult"):  # from torch 2.13
        other = _fsdp_common.FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0)
        elsewhere = _fsdp_common.ShardPlacementResult(Shard(0), other)
        several = fully_shard(
            mlp(depth=1),
            mesh=mesh["shard"],
            shard_placement_fn=lambda p: elsewhere if p.ndim == 1 else None,
        )
        text = r"one parameter group in module \(root\) .*, got 2"
        refuses(text, several)

    model = _wrapped(mesh)
    refuses(r"mesh must have dimensions \('replicate', 'shard'\)", model, mesh["shard"])
    text = r"density must be the same on every rank, got 0.1 on rank 0, 0.2 on rank 1"
    refuses(text, model, density=0.1 * (rank + 1))

    state = dct_fully_shard_hook(model, mesh=mesh, density=0.1)  # no failed call left a hook
    model[2].bias.requires_grad_(False)
    text = r"gradient must have 4225 elements, of all .* module \(root\) .*, got 4224"
    with pytest.raises(ValueError, match=text):
        model(torch.ones(1, 64)).sum().backward()
    state.close()
