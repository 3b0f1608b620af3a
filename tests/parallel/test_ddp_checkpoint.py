"""Checkpoints: each rank goes on from its own bits, and nobody from another's."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dct_parallel import merge_states
from nodes import owed_by_all, same_step
from ranks import (
    Dictated,
    assert_same,
    assert_same_state,
    batch,
    ddp,
    entry,
    hooked,
    integers,
    mlp,
    on_ranks,
    run_ranks,
    through_a_file,
    train,
    train_step,
    weights,
)

SIZES = (2000, 30, 5000)


def _make(density=0.8, **kwargs):
    # At density 0.8 everything has room, so that results do not depend on how buckets are dealt.
    model, state = hooked(ddp(mlp()), density=density, **kwargs)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
@on_ranks(2)
def test_a_checkpoint_goes_on_bit_equal(rank, transport):
    model, state, optimizer = _make(density=0.02, transport=transport)
    for step in range(12):
        if step == 7:
            saved = through_a_file(
                [model.module.state_dict(), optimizer.state_dict(), state.state_dict()]
            )
        train_step(model, optimizer, *batch(step, rank))
    resumed, resumed_state, resumed_optimizer = _make(density=0.02, transport=transport)
    resumed.module.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    resumed_state.load_state_dict(saved[2])
    assert entry(resumed_state.state_dict())["step"] == 7
    train(resumed, resumed_optimizer, rank, range(7, 12))
    assert torch.equal(weights(model), weights(resumed))
    assert assert_same_state(state.state_dict(), resumed_state.state_dict()) > 1000


def _through_dcp(rank, folder, steps, transport):
    """Saved and loaded by torch.distributed.checkpoint, into a state that never compressed."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of DCP itself
    model, state, optimizer = _make(transport=transport)
    train(model, optimizer, rank, range(steps))
    app = {"model": model.module.state_dict(), "dct": state}
    dcp.save(app, checkpoint_id=folder)
    resumed, resumed_state, resumed_optimizer = _make(transport=transport)
    app = {"model": resumed.module.state_dict(), "dct": resumed_state}
    dcp.load(app, checkpoint_id=folder)
    resumed.module.load_state_dict(app["model"])
    resumed_optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    moved = assert_same_state(state.state_dict(), resumed_state.state_dict())
    residual = torch.cat([p["residual"] for p in entry(state.state_dict())["parameters"].values()])
    for step in range(steps, steps + 3):
        train_step(model, optimizer, *batch(step, rank))
        train_step(resumed, resumed_optimizer, *batch(step, rank))
    assert torch.equal(weights(model), weights(resumed))
    assert assert_same_state(state.state_dict(), resumed_state.state_dict()) > 1000
    return moved, residual


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
def test_dcp_gives_every_rank_its_own_bits(tmp_path, transport):
    (moved, ours), (_, theirs) = run_ranks(_through_dcp, 2, tmp_path / "later", 7, transport)
    assert moved > 1000 and not torch.equal(ours, theirs)


@pytest.mark.parametrize("given", [{"density": 0.05}, {"format": "int4"}], ids=["5 %", "int4"])
@pytest.mark.parametrize("first", ["all_gather", "reduce_scatter"])
@on_ranks(2)
def test_dcp_takes_a_state_to_the_other_transport(rank, first, given, tmp_path):
    """What all ranks owe stays the same, and comes in the steps that follow."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of DCP itself
    second = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}[first]
    model, state = hooked(ddp(Dictated(SIZES)), start_step=0, transport=first, **given)
    for step in range(4):
        model(*integers(SIZES, step, rank)).backward()
    before = owed_by_all(state.state_dict())
    assert before.count_nonzero() > 5000
    dcp.save({"dct": state}, checkpoint_id=tmp_path)

    model, state = hooked(ddp(Dictated(SIZES)), start_step=0, transport=second, **given)
    dcp.load({"dct": state}, checkpoint_id=tmp_path)
    torch.testing.assert_close(owed_by_all(state.state_dict()), before)
    came = torch.zeros(sum(SIZES), dtype=torch.float64)
    for _ in range(3):
        came += same_step(model, [torch.zeros(n) for n in SIZES])
    torch.testing.assert_close(came + owed_by_all(state.state_dict()), before)
    assert came.count_nonzero() > 1000


def test_dcp_before_compression_starts(tmp_path):
    results = run_ranks(_through_dcp, 2, tmp_path / "early", 1, "all_gather")
    assert [moved for moved, _ in results] == [0, 0]


def _run(rank, steps, saved, silent, folder=None):
    """The mean gradient applied over `steps`, in all, and this rank's state after them."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of DCP itself
    model, state = hooked(ddp(Dictated(SIZES)), density=0.05)
    if saved is not None:
        state.load_state_dict(saved)
    applied = [torch.zeros(n) for n in SIZES]
    for step in range(steps):
        model.zero_grad()
        grads = integers(SIZES, step, rank)
        model(*(torch.zeros_like(g) if silent else g for g in grads)).backward()
        for total, parameter in zip(applied, model.module.p, strict=True):
            total += parameter.grad
    if folder is not None:
        dcp.save({"app": {"dct": state.state_dict()}}, checkpoint_id=folder)
    return applied, state.state_dict()


@pytest.mark.parametrize("world_size, ranks", [(2, 1), (2, 4), (1, 2)])
def test_the_mean_residual_carries_over_to_another_world_size(world_size, ranks, tmp_path):
    results = run_ranks(_run, world_size, 9, None, False, tmp_path / "dcp")
    states = [through_a_file(state) for _, state in results]
    merged = merge_states(reversed(states))
    from_folder = merge_states(tmp_path / "dcp", key="app.dct")
    assert assert_same_state(merged, from_folder) > 1000
    assert "torch.distributed is disabled" not in str(from_folder)
    later = run_ranks(_run, ranks, 9, through_a_file(merged), True)
    lefts = [entry(state)["parameters"] for _, state in later]
    for index, name in ((0, "p.0"), (2, "p.2")):
        every = [
            integers(SIZES, step, rank)[index] for step in range(9) for rank in range(world_size)
        ]
        left = sum(parameters[name]["residual"] for parameters in lefts) / ranks
        assert later[0][0][index].count_nonzero() > 0
        applied = results[0][0][index] + later[0][0][index]
        assert torch.equal(applied + left, sum(every) / world_size)


def _state(rank, world_size=2, numel=3, **changes):
    own = torch.full((numel,), float(rank))
    parameters = {"p.0": {"residual": own, "owner_residual": ()}}
    numbers = {"run_id": "a", "world_size": world_size, "local_size": 1, "step": 5}
    own = {**numbers, "density": 0.1, "parameters": parameters, **changes}
    return {"version": 6, "ranks": {str(rank): own}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_merging_wants_every_rank_of_one_run_once(tmp_path):
    merged = merge_states(_state(rank) for rank in range(2))
    assert merged["ranks"]["mean"]["parameters"]["p.0"]["residual"].tolist() == [0.5] * 3
    for states, text in [
        ([], "states must be those of all ranks, got none"),
        ([_state(0)], "states must be those of all 2 ranks, got rank 0"),
        ([_state(0), _state(0)], "states must hold one state per rank, got a second of rank 0"),
        ([merged, merged], "states must hold one state per rank, got a merged one"),
        ([_state(0), _state(1, step=6)], "step must be the same .* 5 on rank 0, 6 on rank 1"),
        ([_state(0), _state(1, run_id="b")], "run_id must be the same .* a on rank 0, b on"),
        ([_state(0), _state(1, world_size=3)], "world_size must be the same .* 2 on rank 0, 3 on"),
        (
            [_state(0), _state(1, parameters={})],
            r"parameters must be the same .* p.0 \(residual, owner_residual\) on",
        ),
        ([_state(0), _state(1, numel=4)], r"residual of p.0 of rank 1 must be a float32 \[3\]"),
        ([_state(0), _state(1, step="5")], r"step of rank 1 must be an integer .*, got '5'"),
        ([{"version": 5}], r"version must be 6, .*, got 5"),
        ([{"version": 6}], "ranks must be a dict with strings as keys, got nothing"),
    ]:
        with pytest.raises(ValueError, match=f"dct::merge_states: {text}"):
            merge_states(states)
    dcp.save({"dct": _state(0, 1)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match=r"key must be the name of a state in .*, got 'other'"):
        merge_states(tmp_path, key="other")
    assert merge_states(tmp_path)["ranks"]["mean"]["step"] == 5
    for states, text in [
        (5, "states must be an iterable of all ranks' states, or a folder of them, got int"),
        ([5], "state must be a dict, got int"),
    ]:
        with pytest.raises(TypeError, match=f"dct::merge_states: {text}"):
            merge_states(states)


@on_ranks(2)
def test_a_checkpoint_that_does_not_fit_is_refused(rank):
    model, state, optimizer = _make()
    train(model, optimizer, rank, range(4))
    good = state.state_dict()
    own = entry(good)
    other = {"0.weight": own["parameters"]["0.weight"]}
    short = {k: {**v, "residual": v["residual"][:-1]} for k, v in own["parameters"].items()}
    for change, text in [
        ({"density": 0.1}, r"density must be 0.8, as in this run, got 0.1"),
        ({"world_size": 3}, r"world_size must be 2, as in this run \(merge_states .*\), got 3"),
        ({"parameters": other}, "parameters must be those .* got a difference in 0.bias, 2"),
        ({"parameters": short}, r"residual of .*weight must be a float32 \[4096\] .* \[4095\]"),
    ]:
        with pytest.raises(ValueError, match=f"dct::load_state_dict: {text}"):
            state.load_state_dict({**good, "ranks": {str(rank): {**own, **change}}})
    with pytest.raises(TypeError, match="dct::load_state_dict: state must be a dict, got NoneType"):
        state.load_state_dict(None)
    with pytest.raises(ValueError, match=r"version must be 6, .*, got 5"):
        state.load_state_dict({**good, "version": 5})
    theirs = {"version": 6, "ranks": {str(1 - rank): own}}
    text = f"state must be rank {rank}'s own, or one from merge_states, got that of rank {1 - rank}"
    with pytest.raises(ValueError, match=f"dct::load_state_dict: {text}"):
        state.load_state_dict(theirs)
    state.load_state_dict(good)
    train(model, optimizer, rank, range(4, 6))
    assert_same(weights(model))
