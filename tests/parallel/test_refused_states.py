"""Saved states that are damaged or do not fit: each is refused, and then nothing has changed."""

import math
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dct_parallel import merge_states
from entry_points import Hook, LocalSteps, Sharded
from nodes import TRANSPORTS
from ranks import assert_same_states, entry, on_ranks, run_ranks, through_a_file

SIZES = ((40, 8), (31,))
GONE = object()
VERSION = "must be 6, as dct_kernels 0.3 saves it (earlier states are not read), got"
COUNT = "must be an integer in [1, 2147483647], got"
INDEX = "must be an integer in [0, 2147483647], got"
FRACTION = "must be a number in (0, 1], got"
BY_NAME = "must be a dict with strings as keys, got"
FIT = "as in this run, got"
ANY = "as in this run (load_merged takes any number), got"
MERGE = "as in this run (merge_states makes a state for any number of ranks), got"
MODEL = "parameters must be those of this model, got a difference in"
SAME = "must be the same on every rank, got"
TENSOR = "must be a float32 [320] tensor of finite numbers, got"
OWNER = "must be a tuple, empty or with a float32 [320] tensor of finite numbers, got"
DEALT = "buckets must be lists of parameters of this model, each of them once, got"
REDUCED = ", as reduce_scatter saves it (load_merged reads a folder of either transport)"

# (keys below an entry, the value there, its name in the error, the rest of the error). The first
# parameter, of 320 elements, is "@".
ENTRY = [
    ([], [1], "state", "must be a dict, got list"),
    (["step"], -3, "step", f"{INDEX} -3"),
    (["step"], 6.5, "step", f"{INDEX} 6.5"),
    (["step"], "x", "step", f"{INDEX} 'x'"),
    (["step"], None, "step", f"{INDEX} None"),
    (["step"], True, "step", f"{INDEX} True"),
    (["step"], 2**31, "step", f"{INDEX} 2147483648"),
    (["step"], GONE, "step", f"{INDEX} nothing"),
    (["run_id"], GONE, "run_id", "must be a string, got nothing"),
    (["run_id"], 5, "run_id", "must be a string, got 5"),
    (["world_size"], GONE, "world_size", f"{COUNT} nothing"),
    (["world_size"], "2", "world_size", f"{COUNT} '2'"),
    (["world_size"], 0, "world_size", f"{COUNT} 0"),
    (["density"], GONE, "density", f"{FRACTION} nothing"),
    (["density"], math.nan, "density", f"{FRACTION} nan"),
    (["density"], 0, "density", f"{FRACTION} 0"),
    (["density"], 1.5, "density", f"{FRACTION} 1.5"),
    (["density"], "1", "density", f"{FRACTION} '1'"),
    (["density"], True, "density", f"{FRACTION} True"),
    (["parameters"], GONE, "parameters", f"{BY_NAME} nothing"),
    (["parameters"], [1], "parameters", f"{BY_NAME} [1]"),
    (["parameters"], {0: 1}, "parameters", f"{BY_NAME} {{0: 1}}"),
    (["parameters", "@"], 7, "state of @", "must be a dict, got int"),
]
_PATH, _NAME = ["parameters", "@", "owner_residual"], "owner_residual of @"
OF_RANK = [
    (["local_size"], GONE, "local_size", f"{COUNT} nothing"),
    (["local_size"], 0, "local_size", f"{COUNT} 0"),
    (_PATH, GONE, _NAME, f"{OWNER} nothing"),
    (_PATH, torch.zeros(320), _NAME, f"{OWNER} float32 [320] Tensor"),
    (_PATH, (torch.zeros(3),), _NAME, f"{OWNER} (float32 [3] Tensor)"),
    (_PATH, (torch.zeros(3),) * 2, _NAME, f"{OWNER} (float32 [3] Tensor, float32 [3] Tensor)"),
    (_PATH, (torch.full((320,), math.nan),), _NAME, f"{OWNER} (float32 [320] Tensor with nan)"),
]
OWN = {
    Hook: [
        (["density"], 0.1, "density", f"must be 0.05, {FIT} 0.1"),
        (["world_size"], 3, "world_size", f"must be 2, {MERGE} 3"),
        (["local_size"], 2, "local_size", f"must be 1, {MERGE} 2"),
        (["period"], 5, "state", "must be a DCTState's, got a DCTAverager's"),
        (["buckets"], GONE, "buckets", "must be lists of strings, got nothing"),
        (["buckets"], "x", "buckets", "must be lists of strings, got 'x'"),
        (["buckets"], ["p.0"], "buckets", "must be lists of strings, got ['p.0']"),
        (["buckets"], [[]], "buckets", "must be lists of strings, got [[]]"),
        (["buckets"], [["other"]], DEALT, "other"),
        (["buckets"], [["p.0"], ["p.0"]], DEALT, "p.0, p.0"),
    ],
    LocalSteps: [
        (["density"], 0.1, "density", f"must be 0.05, {FIT} 0.1"),
        (["world_size"], 3, "world_size", f"must be 2, {MERGE} 3"),
        (["shard"], "1 of 2", "shard", f"must be whole, {FIT} 1 of 2"),
        (["shard"], 1, "shard", "must be a string, got 1"),
        (["period"], 3, "period", f"must be 1, {FIT} 3"),
        (["period"], 0, "period", f"{COUNT} 0"),
        (["period"], GONE, "state", "must be a DCTAverager's, got a DCTState's"),
        (["step_ahead"], True, "step_ahead", f"must be False, {FIT} True"),
        (["step_ahead"], 0, "step_ahead", "must be a bool, got 0"),
        (["unaveraged"], GONE, "unaveraged", f"{INDEX} nothing"),
    ],
    Sharded: [
        (["density"], 0.1, "density", f"must be 0.05, {FIT} 0.1"),
        (["replicas"], 1.5, "replicas", f"{COUNT} 1.5"),
        (["replicas"], 4, "replicas", f"must be 2, {ANY} 4"),
        (["replicas"], GONE, "state", "must be a FullyShardState's, got a DCTState's"),
        (["shards"], GONE, "shards", f"{COUNT} nothing"),
        (["transport"], GONE, "transport", "must be a string, got nothing"),
        (["reduction"], "sum of 2", "reduction", f"must be mean, {FIT} sum of 2"),
        (["parameters", "@", "packed"], -1, "packed of @", f"{INDEX} -1"),
        (["parameters", "@", "packed"], GONE, "packed of @", f"{INDEX} nothing"),
    ],
}


def _in_place_of(key, good, more=""):
    """Rows of a table: what must not be in the place of a tensor."""
    shape, kind = list(good.shape), type(good).__name__
    rule = f"a float32 {shape} tensor of finite numbers"
    values = {"nothing": GONE, "'xyz'": "xyz", "None": None, "[0.0]": [0.0]}
    values |= {"float32 [3] Tensor": torch.zeros(3), f"float64 {shape} {kind}": good.double()}
    if isinstance(good, DTensor):
        reshards = "(torch.distributed.checkpoint reshards)"
        rule = f"a DTensor of {shape}, its local part {rule} {reshards}"
        values[f"float32 {[1, *shape]} DTensor"] = good.unsqueeze(0)
    else:
        values[f"float32 {shape} Tensor, torch.strided on meta"] = good.to("meta")
        values[f"float32 {shape} Tensor, torch.sparse_coo on cpu"] = good.to_sparse()
    for number in (math.nan, math.inf, -math.inf):
        spoilt = values[f"float32 {shape} {kind} with {number}"] = good.clone()
        getattr(spoilt, "_local_tensor", spoilt).view(-1)[-1] = number
    return [
        (["parameters", "@", key], value, f"{key} of @", f"must be {rule}{more}, got {got}")
        for got, value in values.items()
    ]


def _with(state, path, value):
    """A copy of the dicts in which this value, or nothing, is at the end of the path."""
    if not path:
        return value
    key, *below = path
    if value is GONE and not below:
        return {k: v for k, v in state.items() if k != key}
    return {**state, key: _with(state.get(key), below, value)}


def _broken(state, table, of=""):
    """(a damaged copy of the state, the error) of each row, and of damage outside of the entry."""
    (holders,) = state.keys() - {"version"}
    ((number, own),) = state[holders].items()
    first = next(iter(own["parameters"]))
    yield [1], "state must be a dict, got list"
    yield None, "state must be a dict, got NoneType"
    for version in (1, 2, 3, 4, 5, 7, True, "6"):
        yield {**state, "version": version}, f"version {VERSION} {version!r}"
    yield _with(state, ["version"], GONE), f"version {VERSION} nothing"
    yield _with(state, [holders], GONE), f"{holders} {BY_NAME} nothing"
    yield {**state, holders: [1]}, f"{holders} {BY_NAME} [1]"
    for path, value, name, rest in table:
        keys = [first if key == "@" else key for key in path]
        text = f"{name}{of} {rest}".replace("@", first)
        yield _with(state, [holders, number, *keys], value), text


def _refuses(call, state, text):
    with pytest.raises((TypeError, ValueError)) as error:
        call(state)
    assert str(error.value) == text
    assert isinstance(error.value, TypeError) == ("must be a dict, got" in text)


def _numbers(step, rank):
    return torch.randn(351, generator=torch.Generator().manual_seed(10 * step + rank))


def _refused(rank, make, settings):
    """In the middle of a run, which ends like one that loads nothing."""
    run, twin = (make(SIZES, density=0.05, start_step=0, **settings) for _ in range(2))
    for step in range(3):
        assert torch.equal(run.step(_numbers(step, rank)), twin.step(_numbers(step, rank)))
    state = run.state.state_dict()
    (holders,) = state.keys() - {"version"}
    own = state[holders][str(rank)]
    first, saved = next(iter(own["parameters"].items()))
    table = ENTRY + OWN[make] + _in_place_of("residual", saved["residual"])
    table.append((["parameters", "other"], {}, MODEL, "other"))
    table.append((["parameters", "@"], GONE, MODEL, "@"))
    sharded, by_owners = make is Sharded, settings["transport"] == "reduce_scatter"
    if sharded:
        rows = _in_place_of("owner_residual", saved["residual"], REDUCED)
        # torch.distributed.checkpoint reads nothing that this run's own state lacks.
        table += rows if by_owners else [(["transport"], "reduce_scatter", *rows[0][2:])]
        table += _in_place_of("shard", saved["shard"])
    else:
        assert len(saved["owner_residual"]) == by_owners
        table += OF_RANK
    if make is LocalSteps:
        table += _in_place_of("base", saved["base"])
    holder, merged = holders[:-1], ", or one from merge_states" * (not sharded)
    other = f"state must be {holder} {rank}'s own{merged}, got that of {holder} 9"
    for broken, text in (*_broken(state, table), ({**state, holders: {"9": own}}, other)):
        _refuses(run.state.load_state_dict, broken, f"dct::load_state_dict: {text}")
        assert_same_states(run.state.state_dict(), state)
    # A sound state may have values that nobody reads, and tensors with a graph, in any memory.
    residual = saved["residual"].clone().requires_grad_()
    residual = residual if sharded else torch.stack([residual, residual], 1)[:, 0]
    path = [holders, str(rank)]
    sound = _with(state, [*path, "parameters", first, "residual"], residual)
    run.state.load_state_dict(_with(sound, [*path, "other"], object()))
    assert_same_states(run.state.state_dict(), state)
    for step in range(3, 6):
        assert torch.equal(run.step(_numbers(step, rank)), twin.step(_numbers(step, rank)))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("make", [Hook, LocalSteps, Sharded])
def test_by_every_entry_point(make, transport):
    mesh = {"mesh": (2, 1)} if make is Sharded else {}
    run_ranks(_refused, 2, make, {"transport": transport, **mesh})


@on_ranks(2)
def test_by_replicas_of_shards(rank, tmp_path):
    """Folders of other models, with damage or without a replica, other reductions and shards."""

    def made(sizes, mesh=(2, 1)):
        return Sharded(sizes, mesh, density=0.05, start_step=0)

    run = made(SIZES)
    run.step(_numbers(0, rank))
    state, nan = run.state.state_dict(), run.state.state_dict()
    if rank == 1:
        nan["replicas"]["1"]["parameters"]["p.0"]["residual"].to_local()[0, 0] = math.nan
    fewer = _with(state, ["replicas"], {"0": {**state["replicas"].get("0", {}), "replicas": 3}})
    saved = {"good": state, "early": {**state, "version": 5}, "nan": nan, "fewer": fewer}
    dcp.save(saved, checkpoint_id=tmp_path)
    good = state["replicas"][str(rank)]["parameters"]["p.0"]["residual"]
    damaged = next(rest for *_, rest in _in_place_of("residual", good) if rest.endswith(" nan"))
    mismatch = "Size mismatch between saved torch.Size([40, 8]) and current: torch.Size([9, 9])"
    for sizes, key, text in (
        (SIZES, "other", f"key must be the name of a state in {tmp_path}, got 'other'"),
        (SIZES, "early", f"version {VERSION} 5"),
        (SIZES, "nan", f"residual of p.0 {damaged}"),
        (SIZES, "fewer", "folder must hold all 3 replicas, got 1"),
        (SIZES[:1], "good", f"{MODEL} p.1"),
        (((9, 9), (31,)), "good", f"folder must hold a state that fits in 'good', got {mismatch}"),
    ):
        other = run if sizes is SIZES else made(sizes)
        before = other.state.state_dict()
        with pytest.raises(ValueError) as error:
            other.state.load_merged(tmp_path, key=key)
        assert str(error.value).startswith(f"dct::load_merged: {text}")
        assert_same_states(other.state.state_dict(), before)
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(4.0)
    rule = "mean of 1 in torch.float32, divide factor 4.0, as in this run"
    text = f"dct::load_state_dict: reduction must be {rule}, got mean"
    _refuses(run.state.load_state_dict, state, text)
    run = made(SIZES[:1], mesh=(1, 2))
    files = [None, None]
    dist.all_gather_object(files, through_a_file(run.state.state_dict()))
    text = f"dct::load_state_dict: state must be that of shard {rank}, got that of shard {1 - rank}"
    _refuses(run.state.load_state_dict, files[1 - rank], text)
    run.state.load_state_dict(files[rank])


@on_ranks(2)
def test_where_an_averager_is_ahead_by_its_residual(rank):
    """A state that would move its weights is refused."""

    def made(**settings):
        ahead = {"step_ahead": True, "transport": "reduce_scatter", "density": 0.05, **settings}
        return LocalSteps(((20_000,), (30_000,)), **ahead)  # both own a range

    def state_of(run):
        run.step(torch.randn(50_000))
        return run.state.state_dict()

    state, both = state_of(made()), [None, None]
    dist.all_gather_object(both, state)
    own = "transport must be reduce_scatter, as in the saved run, with step_ahead"
    for settings, saved, text in (
        ({"transport": "all_gather"}, state, f"{own} (or flush, and start anew), got all_gather"),
        ({"step_ahead": False}, state, f"step_ahead must be False, {FIT} True"),
        (
            {},
            merge_states(both),
            f"state must be rank {rank}'s own with step_ahead (or flush, and start anew), "
            "got one from merge_states",
        ),
    ):
        run = made(**settings)
        before = run.state.state_dict()
        _refuses(run.state.load_state_dict, saved, f"dct::load_state_dict: {text}")
        assert_same_states(run.state.state_dict(), before)
    made().state.load_state_dict(state_of(made(transport="all_gather")))


def _state(rank, world_size=2, **changes):
    """Made by hand."""
    own = {"residual": torch.full((320,), float(rank)), "owner_residual": ()}
    numbers = {"run_id": "a", "world_size": world_size, "local_size": 1, "step": 5, "density": 0.1}
    parts = {"buckets": [["p"]], "parameters": {"p": own}, **changes}
    return {"version": 6, "ranks": {str(rank): {**numbers, **parts}}}


def test_by_merge_states(tmp_path):
    good = [_state(0), _state(1)]
    merged = merge_states(good)
    assert entry(merged)["parameters"]["p"]["residual"].tolist() == [0.5] * 320
    rows = ENTRY + OF_RANK + _in_place_of("residual", entry(good[1])["parameters"]["p"]["residual"])
    for broken, text in _broken(good[1], rows, " of rank 1"):
        _refuses(merge_states, [good[0], broken], f"dct::merge_states: {text}")
    longer = {"p": {"residual": torch.zeros(3), "owner_residual": ()}}
    size = f"{TENSOR} float32 [3] Tensor"
    for states, text in (
        ([], "states must be those of all ranks, got none"),
        ([good[0]], "states must be those of all 2 ranks, got rank 0"),
        ([good[0]] * 2, "states must hold one state per rank, got a second of rank 0"),
        ([merged], "states must hold one state per rank, got a merged one"),
        ([good[0], _state(1, step=6)], f"step {SAME} 5 on rank 0, 6 on rank 1"),
        ([good[0], _state(1, run_id="b")], f"run_id {SAME} a on rank 0, b on rank 1"),
        ([good[0], _state(1, world_size=3)], f"world_size {SAME} 2 on rank 0, 3 on rank 1"),
        ([good[0], _state(1, local_size=2)], f"local_size {SAME} 1 on rank 0, 2 on rank 1"),
        ([good[0], _state(1, density=1)], f"density {SAME} 0.1 on rank 0, 1 on rank 1"),
        ([good[0], _state(1, buckets=[])], f"buckets {SAME} [['p']] on rank 0, [] on rank 1"),
        ([good[0], _state(1, parameters={})], f"parameters {SAME} p on rank 0,  on rank 1"),
        ([good[0], _state(1, parameters=longer)], f"residual of p of rank 1 {size}"),
    ):
        _refuses(merge_states, states, f"dct::merge_states: {text}")
    rule = "an iterable of all ranks' states, or a folder of them"
    with pytest.raises(TypeError, match=f"^dct::merge_states: states must be {rule}, got int$"):
        merge_states(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"dct": good[0], "early": {**good[0], "version": 5}},
            checkpoint_id=tmp_path,
            no_dist=True,
        )
    absent = f"key must be the name of a state in {tmp_path}, got 'other'"
    for key, text in (("other", absent), ("early", f"version {VERSION} 5")):
        _refuses(partial(merge_states, tmp_path), key, f"dct::merge_states: {text}")
