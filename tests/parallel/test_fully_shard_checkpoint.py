"""Checkpoints of sharded replicas: after kills in a step or in a save, and those refused."""

import io
import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from dct_parallel import dct_fully_shard_hook
from ranks import (
    Dictated,
    batch,
    mlp,
    on_ranks,
    run_ranks,
    shard_mesh,
    train_step,
)

SHAPES = ((301, 7), (1, 900), (31,), (2000, 2))  # a row for two shards, and rows that do not divide


def _entry(state_dict):
    (only,) = state_dict["replicas"].values()
    return only


def _weights(model):
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def _make(mesh, **options):
    model = mlp(depth=2)
    columns = {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}
    fully_shard(model[0], mesh=mesh["shard"], **columns)
    fully_shard(model[2], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    state = dct_fully_shard_hook(model, mesh=mesh, density=0.05, **options)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.05)


def _restarted(rank, folder, killed):
    """Trains from the last complete checkpoint on, and may be killed, in a step or in a save."""
    model, state, _ = _make(shard_mesh(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def saved():
        weights, momentum = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": momentum, "dct": state}

    complete = sorted(folder.glob("*/.metadata"))
    if complete:
        app = saved()
        dcp.load(app, checkpoint_id=complete[-1].parent)
        set_state_dict(
            model, optimizer, model_state_dict=app["model"], optim_state_dict=app["optimizer"]
        )
    began = state.step
    for step in range(began, 9):
        if (rank, step, "step") == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(model, optimizer, *batch(step, rank))
        if step % 3 == 2:
            if (rank, step, "save") == killed:
                torch.save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            dcp.save(saved(), checkpoint_id=folder / str(step))
    owed = [part["residual"] for part in _entry(state.state_dict())["parameters"].values()]
    return began, _weights(model), torch.cat([part.to_local().flatten() for part in owed])


def test_killed_and_started_again_is_the_undisturbed_run(tmp_path):
    whole = run_ranks(_restarted, 2, tmp_path / "whole", None)
    for killed, left in (((1, 4, "step"), 2), ((1, 5, "save"), 2), ((0, 8, "save"), 5)):
        with pytest.raises(RuntimeError, match=r"exit codes .*-9"):
            run_ranks(_restarted, 2, tmp_path / "parts", killed)
        complete = sorted(path.parent.name for path in (tmp_path / "parts").glob("*/.metadata"))
        assert complete[-1] == str(left)
    again = run_ranks(_restarted, 2, tmp_path / "parts", None)
    for (_, weights, owed), (began, same_weights, still_owed) in zip(whole, again, strict=True):
        assert began == 6
        assert torch.equal(weights, same_weights)
        assert torch.equal(owed, still_owed) and owed.count_nonzero() > 1000


def _dictated(mesh, **options):
    model = fully_shard(Dictated(SHAPES), mesh=mesh["shard"])
    return model, dct_fully_shard_hook(model, mesh=mesh, density=0.05, start_step=0, **options)


@on_ranks(2)
def test_states_that_do_not_fit_are_refused_by_name(rank, tmp_path):
    mesh = shard_mesh(2, 1)
    model, state = _dictated(mesh)
    model(*map(torch.ones, SHAPES)).backward()
    saved = state.state_dict()
    dcp.save({"dct": state}, checkpoint_id=tmp_path)

    def refuses(text, change):
        entry = dict(_entry(saved))
        change(entry)
        with pytest.raises(ValueError, match=text):
            state.load_state_dict({"version": 6, "replicas": {str(rank): entry}})

    refuses("density must be 0.05, as in this run", lambda e: e.update(density=0.1))
    text = r"state must have owners' residuals \(load_merged reads .*\), got one by reduce_scatter"
    refuses(text, lambda e: e.update(transport="reduce_scatter"))
    refuses("reduction must be mean", lambda e: e.update(reduction="sum of 2"))
    refuses(r"replicas must be 2, as in this run \(load_merged", lambda e: e.update(replicas=4))
    other = {name.replace("p.1", "p.9"): p for name, p in _entry(saved)["parameters"].items()}
    text = "parameters must be those of this model, got a difference in p.1, p.9"
    refuses(text, lambda e: e.update(parameters=other))
    with pytest.raises(ValueError, match=r"version must be 6, .*, got 1"):
        state.load_state_dict(saved | {"version": 1})
    with pytest.raises(ValueError, match=f"state must be replica {rank}'s own, got that of rep"):
        state.load_state_dict({"version": 6, "replicas": {str(1 - rank): _entry(saved)}})
    with pytest.raises(ValueError, match="key must be the name of a dct_fully_shard_hook's state"):
        state.load_merged(tmp_path, key="other")
    smaller = fully_shard(Dictated(SHAPES[:2]), mesh=mesh["shard"])
    early = dct_fully_shard_hook(smaller, mesh=mesh, density=0.05, start_step=0)
    with pytest.raises(ValueError, match="parameters must be those of this model, got a diff"):
        early.load_merged(tmp_path)
    longer = fully_shard(Dictated([(9, 9), *SHAPES[1:]]), mesh=mesh["shard"])
    early = dct_fully_shard_hook(longer, mesh=mesh, density=0.05, start_step=0)
    text = r"folder must hold a state that fits this model in 'dct', got Size mismatch"
    with pytest.raises(ValueError, match=text):
        early.load_merged(tmp_path)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(4.0)
    with pytest.raises(ValueError, match="reduction must be mean of 1 in"):
        state.load_state_dict(saved)
    with pytest.raises(ValueError, match="checkpoint must be the same on every rank"):
        model, state = _dictated(mesh)
        if rank == 0:
            state.load_state_dict(saved)
        model(*map(torch.ones, SHAPES)).backward()


@on_ranks(2)
def test_the_file_of_another_shard_is_refused(rank):
    mesh = shard_mesh(1, 2)
    _, state = _dictated(mesh)
    own = state.state_dict()
    paths = [None, None]
    file = io.BytesIO()
    torch.save(own, file)
    dist.all_gather_object(paths, file.getvalue())
    other = torch.load(io.BytesIO(paths[1 - rank]), weights_only=True)
    with pytest.raises(ValueError, match=r"of p.0 must be .*, its local part|that of shard"):
        state.load_state_dict(other)
    state.load_state_dict(own)
