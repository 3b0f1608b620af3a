"""dct_fully_shard_hook: FSDP2 inside a shard group, compressed exchange between replicas.

Most meshes have 2 replicas of 2 shards. Rank r holds shard r % 2 of replica r // 2.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from dct_kernels import quantized_payload_bytes
from dct_parallel import dct_fully_shard_hook
from support.ranks import assert_same, batch, mlp, on_ranks, shard_mesh, train_step


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
