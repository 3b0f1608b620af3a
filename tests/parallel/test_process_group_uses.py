"""The process group "dct" under DDP, FSDP, optimizers, checkpoints and this package."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTAverager, DCTState, all_reduce_compressed, dct_hook, process_group
from support.ranks import assert_same, batch, mlp, on_ranks, run_ranks, train, train_step, weights

STEPS = 3


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def ddp(model, group):
    return DistributedDataParallel(model, process_group=group)


def fsdp1(model, group, strategy):
    options = {"sharding_strategy": strategy, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, group, use_orig_params=True, **options)


def fsdp2(model, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*model[:2], model):
        fully_shard(module, mesh=mesh)
    return model


def functional_hooks(model, group):
    def reduce(parameter):
        parameter.grad.copy_(functional.all_reduce(parameter.grad, "avg", group))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return model


FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
USES = {
    "DDP": (ddp, "all_reduce"),
    "compiled DDP": (lambda *given: torch.compile(ddp(*given), backend="aot_eager"), "all_reduce"),
    "ZeroRedundancyOptimizer": (ddp, "all_reduce"),
    "FSDP1 FULL_SHARD": (lambda *given: fsdp1(*given, FULL), "reduce_scatter"),
    "FSDP1 SHARD_GRAD_OP": (lambda *given: fsdp1(*given, GRAD_OP), "reduce_scatter"),
    "FSDP2": (fsdp2, "reduce_scatter"),
    "functional collectives": (functional_hooks, "all_reduce"),
}


def full_weights(model):
    """The weights of a model, gathered from its shards."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return weights(model).clone()
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def trained(name, group, rank):
    model = USES[name][0](mlp(), group)
    optimizer = sgd(model)
    if name == "ZeroRedundancyOptimizer":
        options = {"process_group": group, "lr": 0.05, "momentum": 0.9}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)
    train(model, optimizer, rank, range(STEPS))
    return full_weights(model)


@pytest.mark.parametrize("name", USES)
@on_ranks(2)
def test_training(rank, name):
    """With `min_bytes=math.inf`, weights equal gloo's. In int8 they are close, on all ranks."""
    warnings.simplefilter("ignore")  # of FSDP1 and the compiler
    collective = USES[name][1]
    expected = trained(name, dist.new_group(backend="gloo"), rank)
    process_group.configure(min_bytes=math.inf)
    assert torch.equal(trained(name, dist.new_group(backend="dct"), rank), expected)
    assert process_group.stats() == {}
    process_group.configure(min_bytes=4000)
    found = trained(name, dist.new_group(backend="dct"), rank)
    assert_same(found)
    assert 0 < (found - expected).norm() < 0.02 * (expected - weights(mlp())).norm()
    assert list(process_group.stats()) == [collective]
    assert process_group.stats()[collective]["calls"] >= STEPS


@on_ranks(2)
def test_this_package_on_top(rank):
    process_group.configure(min_bytes=4000)
    group = dist.new_group(backend="dct")
    # Their messages are bytes, so they are sent unchanged. The results are those on gloo.
    results = []
    for each in (dist.group.WORLD, group):
        x, residual = torch.linspace(-1, 1, 5000) * (rank + 1), torch.zeros(5000)
        all_reduce_compressed(x, residual, format="int4", group=each)
        model = DistributedDataParallel(mlp(), process_group=each)
        model.register_comm_hook(DCTState(model, format="int4", start_step=0), dct_hook)
        train(model, sgd(model), rank, range(STEPS))
        local = mlp()
        averager = DCTAverager(local, period=2, format="int8", process_group=each)
        optimizer = sgd(local)
        for step in range(4):
            train_step(local, optimizer, *batch(step, rank))
            averager.average_parameters()
        results.append([x, residual, weights(model), weights(local)])
        for tensor in (x, weights(model), weights(local)):
            assert_same(tensor)
    assert all(map(torch.equal, *results))


def _checkpoint(rank, folder):
    process_group.configure(min_bytes=1000, gathers="int8")
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = fully_shard(mlp(), mesh=mesh)
    train_step(model, sgd(model), *batch(0, rank))
    assert process_group.stats().keys() == {"all_gather", "reduce_scatter"}
    saved = [p.to_local().clone() for p in model.parameters()]
    dcp.save(model.state_dict(), checkpoint_id=folder)
    for p in model.parameters():
        torch.nn.init.zeros_(p.to_local())
    dcp.load(state := model.state_dict(), checkpoint_id=folder)
    model.load_state_dict(state)
    assert all(map(torch.equal, (p.to_local() for p in model.parameters()), saved))


def test_checkpoints_are_exact(tmp_path):
    """DCP saves and loads sharded weights bit for bit, also if gathers are compressed."""
    run_ranks(_checkpoint, 2, str(tmp_path), backend="dct")
