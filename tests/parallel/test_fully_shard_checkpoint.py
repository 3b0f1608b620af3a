"""Checkpoints of sharded replicas: bit for bit on the same mesh, and all that is owed on others."""

import io
import math
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
    gathered,
    mlp,
    on_ranks,
    run_ranks,
    shard_mesh,
    through_a_file,
    train,
    train_step,
)

SHAPES = ((301, 7), (1, 900), (31,), (2000, 2))  # a row for two shards, and rows that do not divide


def _entry(state_dict):
    (only,) = state_dict["replicas"].values()
    return only


def _assert_equal(ours, theirs):
    """Two state dicts of one rank, bit for bit; returns how many residuals are not zero."""
    ours, theirs = _entry(ours), _entry(theirs)
    assert ours.keys() == theirs.keys()
    assert all(ours[key] == theirs[key] for key in ours.keys() - {"parameters"})
    assert ours["parameters"].keys() == theirs["parameters"].keys()
    for name, parts in ours["parameters"].items():
        assert parts.keys() == theirs["parameters"][name].keys()
        for key, value in parts.items():
            other = theirs["parameters"][name][key]
            if key == "packed":
                assert value == other
            else:
                assert value.shape == other.shape, (name, key)
                assert torch.equal(value.to_local(), other.to_local()), (name, key)
    return sum(int(p["residual"].to_local().count_nonzero()) for p in ours["parameters"].values())


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


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
@on_ranks(4)
def test_a_checkpoint_goes_on_bit_equal(rank, transport, tmp_path):
    mesh = shard_mesh(2, 2)
    model, state, optimizer = _make(mesh, transport=transport)
    train(model, optimizer, rank, range(7))
    file = through_a_file([model.state_dict(), state.state_dict()])
    dcp.save({"model": model.state_dict(), "dct": state}, checkpoint_id=tmp_path)
    train(model, optimizer, rank, range(7, 12))

    for source in ("file", "dcp"):
        resumed, resumed_state, resumed_optimizer = _make(mesh, transport=transport)
        if source == "file":
            resumed.load_state_dict(file[0])
            resumed_state.load_state_dict(file[1])
        else:
            app = {"model": resumed.state_dict(), "dct": resumed_state}
            dcp.load(app, checkpoint_id=tmp_path)
            resumed.load_state_dict(app["model"])
        assert resumed_state.step == 7
        assert _assert_equal(resumed_state.state_dict(), file[1]) > 1000
        train(resumed, resumed_optimizer, rank, range(7, 12))
        assert torch.equal(_weights(resumed), _weights(model))
        assert _assert_equal(resumed_state.state_dict(), state.state_dict()) > 1000


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


def _owed(state, mesh):
    """What all replicas owe to their mean gradient, of every parameter in full."""
    replicas, shards = mesh.shape
    owed = []
    for saved in _entry(state.state_dict())["parameters"].values():
        own = saved["residual"].full_tensor().double()
        if "owner_residual" in saved:  # in units of the mean
            own = own + replicas * saved["owner_residual"].full_tensor().double()
        owed.append(sum(gathered(own)[::shards]) / replicas)
    return owed


def _save(rank, mesh, folder, transport):
    mesh = shard_mesh(*mesh)
    model, state = _dictated(mesh, transport=transport)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(*(torch.randint(-60, 61, s, generator=generator).float() for s in SHAPES)).backward()
    saved = state.state_dict()
    dcp.save({"app": {"dct": saved}}, checkpoint_id=folder)
    return _owed(state, mesh)


def _load(rank, mesh, folder, transport, saved):
    """What is owed after the load, and what a few steps without gradients deliver."""
    replicas = mesh[0]
    mesh = shard_mesh(*mesh)
    model, state = _dictated(mesh, transport=transport)
    places = state.state_dict()
    if replicas > saved[0]:
        with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
            dcp.load({"app": {"dct": places}}, checkpoint_id=folder)
    else:
        dcp.load({"app": {"dct": places}}, checkpoint_id=folder)
    if replicas == saved[0]:
        state.load_state_dict(places)
    else:
        if replicas < saved[0]:
            with pytest.raises(
                ValueError, match=r"replicas must be ., as in this run \(load_merged"
            ):
                state.load_state_dict(places)
        state.load_merged(folder, key="app.dct")
    owed, step = _owed(state, mesh), state.step
    came = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for _ in range(3):
        model.zero_grad()
        model(*map(torch.zeros, SHAPES)).backward()
        for total, parameter in zip(came, model.parameters(), strict=True):
            total += parameter.grad.full_tensor()
    assert torch.equal(torch.cat(gathered(came[0])), came[0].repeat(dist.get_world_size(), 1))
    assert all(total.count_nonzero() > 0.03 * total.numel() for total in came[:1] + came[3:])
    sums = [a + b for a, b in zip(came, _owed(state, mesh), strict=True)]
    return owed, sums, step


@pytest.mark.parametrize(
    ("saved", "loaded", "transport"),
    [
        ((2, 2), (2, 1), "all_gather"),
        pytest.param((2, 1), (2, 2), "reduce_scatter", marks=pytest.mark.large),
        ((4, 1), (2, 1), "all_gather"),
        ((2, 1), (1, 2), "reduce_scatter"),
        ((1, 2), (2, 1), "all_gather"),
    ],
)
def test_what_is_owed_carries_over_to_another_mesh(saved, loaded, transport, tmp_path):
    before = run_ranks(_save, saved[0] * saved[1], saved, tmp_path / "dcp", transport)
    ranks = loaded[0] * loaded[1]
    after = run_ranks(_load, ranks, loaded, tmp_path / "dcp", transport, saved)
    for owed, sums, step in after:
        assert step == 6
        for old, now, later in zip(before[0], owed, sums, strict=True):
            largest = old.abs().max().item()
            torch.testing.assert_close(now, old, rtol=0, atol=1e-6 * largest)
            torch.testing.assert_close(later, old, rtol=0, atol=1e-6 * largest)


def _int4(rank, mesh, folder, before):
    """Trains and saves, or goes on from the folder; what is owed, and the transport by default."""
    mesh = shard_mesh(*mesh)
    model = fully_shard(Dictated(SHAPES), mesh=mesh["shard"])
    state = dct_fully_shard_hook(model, mesh=mesh, format="int4", start_step=0)
    if before:
        state.load_merged(folder)
    else:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            model(*(torch.randn(shape, generator=generator) for shape in SHAPES)).backward()
        dcp.save({"dct": state}, checkpoint_id=folder)
    return _owed(state, mesh), _entry(state.state_dict())["transport"]


@pytest.mark.parametrize("first, second", [((2, 1), (3, 1)), ((4, 1), (2, 2))])
def test_load_merged_where_the_default_transport_changes(first, second, tmp_path):
    owed, transport = run_ranks(_int4, first[0], first, tmp_path / "dcp", False)[0]
    for later, other in run_ranks(_int4, math.prod(second), second, tmp_path / "dcp", True):
        assert {transport, other} == {"all_gather", "reduce_scatter"}
        for old, new in zip(owed, later, strict=True):
            assert old.count_nonzero() > 0.9 * old.numel()
            torch.testing.assert_close(new, old, rtol=0, atol=1e-6 * old.abs().max().item())


@pytest.mark.parametrize("first", ["all_gather", "reduce_scatter"])
@on_ranks(2)
def test_a_state_dict_is_loaded_into_the_other_transport(rank, first):
    """From files, which hold what owners keep or do not: all that is owed stays the same."""
    mesh, second = shard_mesh(2, 1), {"all_gather", "reduce_scatter"} - {first}
    model, state = _dictated(mesh, transport=first)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        model(*(torch.randn(shape, generator=generator) for shape in SHAPES)).backward()
    _, other = _dictated(mesh, transport=second.pop())
    other.load_state_dict(through_a_file(state.state_dict()))
    assert other.step == 4
    for old, new in zip(_owed(state, mesh), _owed(other, mesh), strict=True):
        assert old.count_nonzero() > 0.9 * old.numel()
        torch.testing.assert_close(new, old, rtol=0, atol=1e-6 * old.abs().max().item())


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
