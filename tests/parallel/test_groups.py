"""The process group of a state: creation next to other groups, timeout, and release."""

import gc
import os
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from dct_parallel import DCTAverager, DCTState, dct_fully_shard_hook, dct_hook
from dct_parallel.groups import separate_group, timeout_of
from support.entry_points import Hook, LocalSteps, NodeMesh, Sharded
from support.ranks import (
    assert_same,
    assert_same_states,
    ddp,
    entry,
    mlp,
    on_ranks,
    shard_mesh,
    train,
    weights,
)


def _train(rank, model, state, steps=4):
    model.register_comm_hook(state, dct_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, rank, range(steps))


@on_ranks(3)
def test_ranks_may_have_different_numbers_of_groups(rank):
    """Some ranks create additional groups first. States use all ranks or a subgroup."""
    some = dist.new_group([0, 2])
    dist.new_group([2], use_local_synchronization=True)  # only rank 2 has this group
    model = ddp(mlp())
    _train(rank, model, DCTState(model, density=0.1))
    assert_same(weights(model))
    if rank != 1:
        model = ddp(mlp(), process_group=some)
        _train(rank, model, DCTState(model, density=0.1))
        parts = [torch.empty_like(weights(model)) for _ in range(2)]
        dist.all_gather(parts, weights(model), group=some)
        assert torch.equal(*parts)
    dist.barrier()


@on_ranks(3)
def test_separate_group_has_the_same_ranks_and_its_own_timeout(rank):
    group = dist.new_group([1, 2])
    if rank != 0:
        made = [separate_group(group, name, timedelta(seconds=50)) for name in ("a", "b")]
        for separate in made:
            assert timeout_of(separate, torch.device("cpu")) == timedelta(seconds=50)
            assert separate is not group and dist.get_backend(separate) == "gloo"
            assert dist.get_process_group_ranks(separate) == [1, 2]
            assert dist.get_rank(separate) == rank - 1
            total = torch.tensor([rank])
            dist.all_reduce(total, group=separate)
            assert total.item() == 3
        assert made[0].group_name != made[1].group_name
    dist.barrier(dist.new_group([0, 1, 2]))  # later groups have equal names on all ranks


@pytest.mark.parametrize(("transport", "started"), [("all_gather", 0), ("reduce_scatter", 1)])
@on_ranks(2)
def test_close_releases_thread_and_group(rank, transport, started):
    """A state starts a thread if an exchange has more than one collective."""
    model = ddp(mlp())
    state = DCTState(model, density=0.1, transport=transport)
    _train(rank, model, state)

    def resources():
        names = [thread.name for thread in threading.enumerate()]
        return names.count("dct"), len(dist.distributed_c10d._world.pg_names)

    threads, groups = resources()
    before = state.state_dict()
    for _ in range(2):
        state.close()
        assert resources() == (threads - started, groups - 1)
    assert_same_states(before, state.state_dict())
    assert "DCT: density 0.1" in state.plan() and state.stats()["step"] == 4
    with pytest.raises(ValueError, match="state must be open, got a closed one"):
        model(torch.ones(1, 64)).sum().backward()
    # A new state works after close(). It can be closed even after all groups are destroyed.
    model = ddp(mlp())
    state = DCTState(model, density=0.1)
    _train(rank, model, state)
    dist.barrier()
    dist.destroy_process_group()
    state.close()
    del model, state
    gc.collect()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


POINTS = [Hook, NodeMesh, partial(Sharded, mesh=(2, 1)), LocalSteps]


@pytest.mark.parametrize("point", POINTS)
@on_ranks(2)
def test_state_can_be_read_and_saved_after_groups_are_destroyed(rank, point):
    """destroy_process_group runs after the last step, as at the end of a program."""
    other = point([5000], start_step=0, density=0.1)
    run = point([5000], start_step=0, density=0.1)
    numbers = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
    for training in (other, run):
        training.step(numbers)
    before = {name: getattr(other.state, name)() for name in ("plan", "stats", "state_dict")}
    dist.destroy_process_group()
    assert run.state.plan() == before["plan"] and run.state.stats() == before["stats"]
    saved = run.state.state_dict(), before["state_dict"]
    assert_same_states(*(entry(state)["parameters"] for state in saved))
    if point is LocalSteps:
        text = "dct::load_state_dict: group must exist, got one that was destroyed"
        with pytest.raises(ValueError, match=text):
            run.state.load_state_dict(before["state_dict"])
    else:
        run.state.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("swap", [False, True])
@on_ranks(2)
def test_modules_can_be_moved_and_converted(rank, swap):
    """With any `swap`, torch swaps sharded parameters, which fails if they have weak references."""
    mesh, unsharded = shard_mesh(2, 1), nn.Linear(16, 4)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    sharded, averaged = (
        fully_shard(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), mesh=mesh["shard"])
        for _ in range(2)
    )
    group = mesh["replicate"].get_group()
    states = [
        dct_fully_shard_hook(sharded, mesh=mesh),
        DCTAverager(averaged, process_group=group),
        DCTAverager(unsharded),
    ]
    for module in (sharded, averaged, unsharded):
        before = [_local(p).clone() for p in module.parameters()]
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
        module.to("cpu").to(torch.bfloat16).to(torch.float32)
        for parameter, value in zip(module.parameters(), before, strict=True):
            assert torch.equal(_local(parameter), value.bfloat16().float())
    del states


def _dct_state(mesh):
    model = ddp(mlp(depth=1))
    state = DCTState(model, density=0.1, transport="reduce_scatter")  # has a thread
    model.register_comm_hook(state, dct_hook)
    return model


def _sharded_state(mesh):
    model = fully_shard(nn.Linear(64, 1), mesh=mesh["shard"])
    dct_fully_shard_hook(model, mesh=mesh)
    return model


def _averager(mesh):
    model = nn.Linear(64, 1)
    averager = DCTAverager(model, period=1)
    model.register_forward_pre_hook(lambda *_: averager.average_parameters())
    return model


@pytest.mark.parametrize("made", [_dct_state, _sharded_state, _averager])
@on_ranks(2)
def test_garbage_collection_releases_threads_and_files(rank, made):
    mesh = shard_mesh(2, 1)

    def resources():
        gc.collect()
        threads, files = (len(os.listdir(f"/proc/self/{of}")) for of in ("task", "fd"))
        return threads, files, len(dist.distributed_c10d._world.pg_names)

    before = None
    for _ in range(8):
        model = made(mesh)
        for _ in range(3):
            model(torch.ones(1, 64)).sum().backward()
        del model
        before = before or resources()  # excludes threads that torch starts once
    deadline = time.monotonic() + 20  # threads end with a delay
    while any(now > then for now, then in zip(resources(), before, strict=True)):
        assert time.monotonic() < deadline, (resources(), before)
        time.sleep(0.05)
