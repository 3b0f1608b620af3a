"""Loading a state that is corrupted or does not fit raises and changes nothing."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dct_parallel import merge_states
from support.entry_points import Hook, LocalSteps, Sharded
from support.nodes import TRANSPORTS
from support.ranks import assert_same_states, entry, on_ranks, through_a_file

SIZES = ((40, 8), (31,))
GONE = object()

# {key of an entry: invalid values}. The last values have a valid type and do not fit the run.
ENTRY = {
    "step": (-3, 6.5, "x", None, True, 2**31, GONE),
    "run_id": (5, GONE),
    "world_size": (0, "2", GONE),
    "density": (0, 1.5, "1", True, math.nan, GONE, 0.25),
    "format": (5, GONE),
    "transport": ("x", 5, GONE),
    "refresh_every": (0, GONE),
    "parameters": ([1], {0: 1}, GONE),
}
OF_RANK = {**ENTRY, "world_size": (0, "2", GONE, 3), "local_size": (0, GONE, 2)}
ENTRIES = {
    Hook: {
        **OF_RANK,
        "start_step": (-1, GONE),
        "buckets": ("x", ["p.0"], [[]], GONE, [["other"]], [["p.0"], ["p.0"]]),
    },
    LocalSteps: {
        **OF_RANK,
        "shard": (1, GONE, "1 of 2"),
        "period": (0, 3),
        "step_ahead": (0, GONE, True),
        "unaveraged": (GONE,),
    },
    Sharded: {
        **ENTRY,
        "replicas": (1.5, 4),
        "shards": (0, GONE),
        "start_step": (-1, GONE),
        "reduction": ("sum of 2",),
    },
}
OTHER_KIND = {Hook: ("period", 5), LocalSteps: ("period", GONE), Sharded: ("replicas", GONE)}
OWNER = (GONE, torch.zeros(320), (torch.zeros(3),), (torch.zeros(3),) * 2)
OWNER += ((torch.full((320,), math.nan),),)


def _bad_tensors(good):
    """Return invalid values for a tensor."""
    values = [GONE, "xyz", None, [0.0], torch.zeros(3), good.double()]
    if isinstance(good, DTensor):
        longer = torch.Size([len(good) + 1, *good.shape[1:]])
        parts = good.to_local(), good.device_mesh, good.placements
        values.append(DTensor.from_local(*parts, shape=longer, stride=good.stride()))
    else:
        values += [good.to("meta"), good.to_sparse(), good.to(torch.float8_e4m3fn)]
        with warnings.catch_warnings():  # nested tensors are a prototype
            warnings.simplefilter("ignore")
            values.append(torch.nested.nested_tensor([good]))
    for number in (math.nan, math.inf, -math.inf):
        values.append(good.clone())
        getattr(values[-1], "_local_tensor", values[-1]).view(-1)[-1] = number
    return values


def _with(state, path, value):
    """Return a copy of nested dicts with `value` at the path. GONE removes the key."""
    if not path:
        return value
    key, *below = path
    if value is GONE and not below:
        return {k: v for k, v in state.items() if k != key}
    return {**state, key: _with(state.get(key), below, value)}


def _broken(state, first, of_entry, of_parameter):
    """Yield (corrupted state, the name in the error)."""
    (holders,) = state.keys() - {"version"}
    (number,) = state[holders]
    of_state = {"version": (1, 2, 3, 4, 5, 7, True, "6", GONE), holders: (GONE, [1])}
    parameter = [holders, number, "parameters", first]
    yield from (([1], "state"), (None, "state"))
    yield _with(state, parameter[:2], [1]), "state"
    yield _with(state, parameter, 7), f"state of {first}"
    for path, table in (([], of_state), (parameter[:2], of_entry), (parameter, of_parameter)):
        for key, values in table.items():
            for value in values:
                name = f"{key} of {first}" if path is parameter else key
                yield _with(state, [*path, key], value), name


def _refuses(call, state, text):
    with pytest.raises((TypeError, ValueError), match=text) as error:
        call(state)
    assert isinstance(error.value, TypeError) == ("must be a dict, got" in str(error.value))


def _numbers(step, rank):
    return torch.randn(351, generator=torch.Generator().manual_seed(10 * step + rank))


def _check_refusals(rank, make, settings):
    """Try all invalid states during a run."""
    run = make(SIZES, density=0.05, start_step=0, **settings)
    for step in range(3):
        state = run.state.state_dict()  # an earlier state, which must leave no trace
        run.step(_numbers(step, rank))
    before = run.state.state_dict()
    (holders,) = state.keys() - {"version"}
    path = [holders, str(rank)]
    first, saved = next(iter(state[holders][str(rank)]["parameters"].items()))
    sharded, by_owners = make is Sharded, settings["transport"] == "reduce_scatter"
    of_parameter = {k: _bad_tensors(v) for k, v in saved.items() if isinstance(v, torch.Tensor)}
    of_parameter |= {"packed": (-1, GONE)} if sharded else {"owner_residual": OWNER}
    key, value = OTHER_KIND[make]
    cases = [
        *_broken(state, first, ENTRIES[make], of_parameter),
        (_with(state, [*path, "parameters", "other"], {}), "parameters"),
        (_with(state, [*path, "parameters", first], GONE), "parameters"),
        (_with(state, [*path, key], value), "state"),
        ({**state, holders: {"9": state[holders][str(rank)]}}, "state"),
        ({**state, holders: {}}, "state"),
    ]
    if sharded and not by_owners:
        cases.append((_with(state, [*path, "transport"], "reduce_scatter"), "owner_residual"))
    for broken, name in cases:
        _refuses(run.state.load_state_dict, broken, rf"^dct::load_state_dict: {name}\b.* must be ")
        assert_same_states(run.state.state_dict(), before)
    # A valid state may have unknown keys, tensors that require grad, and strided tensors.
    parameters = before[holders][str(rank)]["parameters"]
    residual = parameters[first]["residual"].clone().requires_grad_()
    changed = {"residual": residual if sharded else torch.stack([residual, residual], 1)[:, 0]}
    if by_owners and not sharded:
        (owned,) = parameters[first]["owner_residual"]
        changed["owner_residual"] = (owned.clone().requires_grad_(),)
    valid = _with(before, [*path, "parameters", first], {**parameters[first], **changed})
    run.state.load_state_dict(_with(valid, [*path, "other"], object()))
    assert_same_states(run.state.state_dict(), before)


@pytest.mark.parametrize("make", [Hook, LocalSteps, Sharded])
@on_ranks(2)
def test_entry_points_refuse_invalid_states(rank, make):
    for transport in TRANSPORTS:
        mesh = {"mesh": (2, 1)} if make is Sharded else {}
        _check_refusals(rank, make, {"transport": transport, **mesh})


@on_ranks(2)
def test_load_merged_refuses_invalid_folders(rank, tmp_path):
    """All ranks reject a folder even if only one rank reads the corrupted part."""

    def made(sizes, mesh=(2, 1)):
        return Sharded(sizes, mesh, density=0.05, start_step=0)

    def refuses(run, key, text):
        before = run.state.state_dict()
        with pytest.raises((ValueError, RuntimeError), match=f"^dct::load_merged: {text}"):
            run.state.load_merged(tmp_path, key=key)
        assert_same_states(run.state.state_dict(), before)

    run = made(SIZES)
    run.step(_numbers(0, rank))
    state, nan = run.state.state_dict(), run.state.state_dict()
    if rank == 0:  # replica 0 is read first
        nan["replicas"]["0"]["parameters"]["p.0"]["residual"].to_local()[0, 0] = math.nan
    fewer = _with(state, ["replicas"], {"0": {**state["replicas"].get("0", {}), "replicas": 3}})
    saved = {"good": state, "early": {**state, "version": 5}, "nan": nan, "fewer": fewer}
    keys, path = ["replicas", str(rank)], ["parameters", "p.0", "residual"]
    good = state["replicas"][str(rank)]["parameters"]["p.0"]["residual"]
    saved["complex"] = _with(state, [*keys, *path], good.to(torch.complex64))
    dcp.save(saved, checkpoint_id=tmp_path)
    damaged = "residual of p.0 must be a DTensor of .*, got"
    for key, text in (
        ("other", "key must be the name of a state in .*, got 'other'"),
        ("early", "version must be 6, .*, got 5"),
        ("complex", f"{damaged} complex64"),
        ("nan", f"{damaged} .* with nan"),
        ("fewer", "folder must hold all 3 replicas, got 1"),
    ):
        refuses(run, key, text)
    refuses(made(SIZES[:1]), "good", "parameters must be those of this model, got .* p.1")
    refuses(made(((9, 9), (31,))), "good", "folder must hold a state that fits in 'good', got Size")
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(4.0)
    _refuses(run.state.load_state_dict, state, "reduction must be .* divide factor 4.0, as in this")
    peer = "every rank must take part, got ValueError from rank 0: dct::load_merged: " * rank
    refuses(made(SIZES, mesh=(1, 2)), "nan", f"{peer}{damaged} .* with nan")
    run = made(SIZES[:1], mesh=(1, 2))
    files = [None, None]
    dist.all_gather_object(files, through_a_file(run.state.state_dict()))
    text = f"state must be that of shard {rank}, got that of shard {1 - rank}"
    _refuses(run.state.load_state_dict, files[1 - rank], text)
    run.state.load_state_dict(files[rank])


@on_ranks(2)
def test_step_ahead_refuses_states_that_would_move_weights(rank):
    def made(**settings):
        ahead = {"step_ahead": True, "transport": "reduce_scatter", "density": 0.05, **settings}
        return LocalSteps(((20_000,), (30_000,)), **ahead)  # both ranks own a range

    def state_of(run):
        run.step(torch.randn(50_000))
        return run.state.state_dict()

    state, both = state_of(made()), [None, None]
    dist.all_gather_object(both, state)
    for settings, saved, text in (
        ({"transport": "all_gather"}, state, "transport must be reduce_scatter, .*got all_gather"),
        ({"step_ahead": False}, state, "step_ahead must be False"),
        ({}, merge_states(both), f"state must be rank {rank}'s own .*, got one from merge_states"),
    ):
        run = made(**settings)
        before = run.state.state_dict()
        _refuses(run.state.load_state_dict, saved, f"^dct::load_state_dict: {text}")
        assert_same_states(run.state.state_dict(), before)
    with pytest.warns(UserWarning, match="transport all_gather"):
        made().state.load_state_dict(state_of(made(transport="all_gather")))


def _state(rank, world_size=2, **changes):
    residuals = {"residual": torch.full((320,), float(rank)), "owner_residual": ()}
    numbers = {"run_id": "a", "world_size": world_size, "local_size": 1, "step": 5, "density": 0.1}
    settings = {"format": "int8", "transport": "all_gather", "refresh_every": 1, "start_step": 2}
    parts = {"buckets": [["p"]], "parameters": {"p": residuals}, **changes}
    return {"version": 6, "ranks": {str(rank): {**numbers, **settings, **parts}}}


def test_merge_states_refuses_invalid_states(tmp_path):
    good = [_state(0), _state(1)]
    merged = merge_states(good)
    residual = entry(merged)["parameters"]["p"]["residual"]
    assert residual.tolist() == [0.5] * 320
    of_parameter = {"residual": _bad_tensors(residual), "owner_residual": OWNER}
    for broken, name in _broken(good[1], "p", OF_RANK, of_parameter):
        _refuses(merge_states, [good[0], broken], rf"^dct::merge_states: {name}\b.* must be ")
    longer = {"p": {"residual": torch.zeros(3), "owner_residual": ()}}
    for states, text in (
        ([], "states must be those of all ranks, got none"),
        ([good[0], _state(7)], "states must be those of all 2 ranks, got ranks 0, 7"),
        ([good[0]] * 2, "states must hold one state per rank, got a second of rank 0"),
        ([merged], "states must hold one state per rank, got a merged one"),
        ([good[0], _state(1, step=6)], "step must be the same on every rank, got 5 on rank 0, 6 "),
        ([good[0], _state(1, local_size=2)], "local_size must be the same"),
        ([good[0], _state(1, buckets=[])], "buckets must be the same"),
        ([good[0], _state(1, parameters={})], "parameters must be the same"),
        ([good[0], _state(1, parameters=longer)], r"residual of p of rank 1 must be a float32 \[3"),
        (tmp_path / "absent", "folder must be a folder that torch.distributed.checkpoint wrote"),
    ):
        _refuses(merge_states, states, f"^dct::merge_states: {text}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = {"dct": good[0], "early": {**good[0], "version": 5}}
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    for key, text in (("other", "key must be the name of a state"), ("early", "version must be 6")):
        with pytest.raises(ValueError, match=f"^dct::merge_states: {text}"):
            merge_states(tmp_path, key)
    _refuses(merge_states, next(tmp_path.glob("*.distcp")), "^dct::merge_states: folder must be a")


@pytest.mark.parametrize("point", [Hook, LocalSteps])
def test_sparse_and_dense_states_are_not_interchangeable(one_rank, point):
    """The error names the kind of format, not only the density."""
    sparse, dense = point([5000], density=0.01), point([5000], density=1, format="int4")
    for run, saved, expected, found in (
        (dense, sparse, "all entries", "the largest entries"),
        (sparse, dense, "the largest entries", "all entries"),
    ):
        text = f"^dct::load_state_dict: format must send {expected}.*got a state of {found}"
        with pytest.raises(ValueError, match=text):
            run.state.load_state_dict(saved.state.state_dict())
