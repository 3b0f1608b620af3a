"""Loading a state that is corrupted or does not fit raises and changes nothing."""

import math
import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dct_parallel import merge_states
from support.entry_points import Hook, LocalSteps, Sharded
from support.nodes import TRANSPORTS
from support.ranks import assert_same_states, entry, on_ranks, run_ranks, through_a_file

SIZES = ((40, 8), (31,))
GONE = object()
VERSION = "must be 6, as dct_kernels 0.3 saves it (earlier states are not read), got"
COUNT, INDEX = (f"an integer in [{low}, 2147483647]" for low in (1, 0))
BY_NAME = "a dict with strings as keys"
FIT = "as in this run"
MERGE = "as in this run (merge_states makes a state for any number of ranks)"
MODEL = "parameters must be those of this model, got a difference in"
SAME = "must be the same on every rank, got"
TENSOR = "a float32 [320] tensor of finite numbers"
REDUCED = ", as reduce_scatter saves it (load_merged reads a folder of either transport)"

# (key of an entry, its rule, invalid values or {value as printed in the error: value}).
ENTRY = [
    ("step", INDEX, (-3, 6.5, "x", None, True, 2**31, GONE)),
    ("run_id", "a string", (5, GONE)),
    ("world_size", COUNT, (0, "2", GONE)),
    ("density", "a number in (0, 1]", (0, 1.5, "1", True, math.nan, GONE)),
    ("parameters", BY_NAME, ([1], {0: 1}, GONE)),
]
OF_RANK = [*ENTRY, ("local_size", COUNT, (0, GONE))]
TWICE = {"other": [["other"]], "p.0, p.0": [["p.0"], ["p.0"]]}
RULES = {
    Hook: [
        *OF_RANK,
        ("density", f"0.05, {FIT}", {"0.1": 0.1}),
        ("world_size", f"2, {MERGE}", {"3": 3}),
        ("local_size", f"1, {MERGE}", {"2": 2}),
        ("buckets", "lists of strings", ("x", ["p.0"], [[]], GONE)),
        ("buckets", "lists of parameters of this model, each at most once", TWICE),
    ],
    LocalSteps: [
        *OF_RANK,
        ("density", f"0.05, {FIT}", {"0.1": 0.1}),
        ("world_size", f"2, {MERGE}", {"3": 3}),
        ("shard", f"whole, {FIT}", {"1 of 2": "1 of 2"}),
        ("shard", "a string", (1, GONE)),
        ("period", f"1, {FIT}", {"3": 3}),
        ("period", COUNT, (0,)),
        ("step_ahead", f"False, {FIT}", {"True": True}),
        ("step_ahead", "a bool", (0, GONE)),
        ("unaveraged", INDEX, (GONE,)),
    ],
    Sharded: [
        *ENTRY,
        ("density", f"0.05, {FIT}", {"0.1": 0.1}),
        ("replicas", COUNT, (1.5,)),
        ("replicas", f"2, {FIT} (load_merged takes any number)", {"4": 4}),
        ("shards", COUNT, (0, GONE)),
        ("transport", "'all_gather' or 'reduce_scatter'", ("x", 5, GONE)),
        ("reduction", f"mean, {FIT}", {"sum of 2": "sum of 2"}),
    ],
}
# (path below an entry, value, error). "@" stands for the first parameter, which has 320 elements.
# "%" stands for " of rank 1" in merge_states, and for an empty string elsewhere.
KIND = {
    Hook: (["period"], 5, "state must be a DCTState's, got a DCTAverager's"),
    LocalSteps: (["period"], GONE, "state must be a DCTAverager's, got a DCTState's"),
    Sharded: (["replicas"], GONE, "state must be a FullyShardState's, got a DCTState's"),
}
DICTS = [
    ([], [1], "state% must be a dict, got list"),
    (["parameters", "@"], 7, "state of @% must be a dict, got 7"),
]


def _rows(table, *path, of=""):
    for key, rule, values in table:
        if not isinstance(values, dict):
            values = {"nothing" if value is GONE else repr(value): value for value in values}
        for got, value in values.items():
            yield [*path, key], value, f"{key}{of}% must be {rule}, got {got}"


def _of_parameter(key, rule, values):
    return [*_rows([(key, rule, values)], "parameters", "@", of=" of @")]


def _bad_tensors(key, good, more=""):
    """Return rows (path, value, error) with invalid values for a tensor."""
    shape, kind = list(good.shape), type(good).__name__
    rule = f"a float32 {shape} tensor of finite numbers"
    values = {"nothing": GONE, "'xyz'": "xyz", "None": None, "[0.0]": [0.0]}
    values |= {"float32 [3] Tensor": torch.zeros(3), f"float64 {shape} {kind}": good.double()}
    if isinstance(good, DTensor):
        rule = (
            f"a DTensor of {shape}, its local part {rule} (torch.distributed.checkpoint reshards)"
        )
        longer = {"shape": torch.Size([shape[0] + 1, *shape[1:]]), "stride": good.stride()}
        parts = good.to_local(), good.device_mesh, good.placements
        values[f"float32 {[*longer['shape']]} DTensor"] = DTensor.from_local(*parts, **longer)
    else:
        values[f"float32 {shape} Tensor, torch.strided on meta"] = good.to("meta")
        values[f"float32 {shape} Tensor, torch.sparse_coo on cpu"] = good.to_sparse()
        values[f"float8_e4m3fn {shape} Tensor"] = good.to(torch.float8_e4m3fn)
        with warnings.catch_warnings():  # nested tensors are a prototype
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor([good])
        values["float32 nested Tensor, torch.strided on cpu"] = nested
    for number in (math.nan, math.inf, -math.inf):
        invalid = values[f"float32 {shape} {kind} with {number}"] = good.clone()
        getattr(invalid, "_local_tensor", invalid).view(-1)[-1] = number
    return _of_parameter(key, rule + more, values)


OWNER = _of_parameter(
    "owner_residual",
    f"a tuple, empty or with {TENSOR}",
    {
        "nothing": GONE,
        "float32 [320] Tensor": torch.zeros(320),
        "(float32 [3] Tensor)": (torch.zeros(3),),
        "(float32 [3] Tensor, float32 [3] Tensor)": (torch.zeros(3),) * 2,
        "(float32 [320] Tensor with nan)": (torch.full((320,), math.nan),),
    },
)


def _with(state, path, value):
    """Return a copy of nested dicts with `value` at the path. GONE removes the key."""
    if not path:
        return value
    key, *below = path
    if value is GONE and not below:
        return {k: v for k, v in state.items() if k != key}
    return {**state, key: _with(state.get(key), below, value)}


def _broken(state, table, of=""):
    """Yield (corrupted state, error) for each row of `table`, and for corruption elsewhere."""
    (holders,) = state.keys() - {"version"}
    ((number, saved_entry),) = state[holders].items()
    first = next(iter(saved_entry["parameters"]))
    yield [1], "state must be a dict, got list"
    yield None, "state must be a dict, got None"
    for version in (1, 2, 3, 4, 5, 7, True, "6"):
        yield {**state, "version": version}, f"version {VERSION} {version!r}"
    yield _with(state, ["version"], GONE), f"version {VERSION} nothing"
    yield _with(state, [holders], GONE), f"{holders} must be {BY_NAME}, got nothing"
    yield {**state, holders: [1]}, f"{holders} must be {BY_NAME}, got [1]"
    for path, value, text in table:
        keys = [first if key == "@" else key for key in path]
        text = text.replace("@", first).replace("%", of)
        yield _with(state, [holders, number, *keys], value), text


def _refuses(call, state, text):
    with pytest.raises((TypeError, ValueError)) as error:
        call(state)
    assert str(error.value) == text
    assert isinstance(error.value, TypeError) == ("must be a dict, got" in text)


def _numbers(step, rank):
    return torch.randn(351, generator=torch.Generator().manual_seed(10 * step + rank))


def _check_refusals(rank, make, settings):
    """Try all invalid states during a run. The run must continue like one without loads."""
    run, twin = (make(SIZES, density=0.05, start_step=0, **settings) for _ in range(2))
    for step in range(3):
        state = run.state.state_dict()  # an earlier state, which must leave no trace
        assert torch.equal(run.step(_numbers(step, rank)), twin.step(_numbers(step, rank)))
    before = run.state.state_dict()
    (holders,) = state.keys() - {"version"}
    saved_entry = state[holders][str(rank)]
    first, saved = next(iter(saved_entry["parameters"].items()))
    table = [*_rows(RULES[make]), KIND[make], *DICTS, *_bad_tensors("residual", saved["residual"])]
    table += [(["parameters", n], v, f"{MODEL} {n}") for n, v in (("other", {}), ("@", GONE))]
    sharded, by_owners = make is Sharded, settings["transport"] == "reduce_scatter"
    if sharded:
        rows = _bad_tensors("owner_residual", saved["residual"], REDUCED)
        # torch.distributed.checkpoint loads only keys that this run's own state has.
        table += rows if by_owners else [(["transport"], "reduce_scatter", rows[0][2])]
        table += _bad_tensors("shard", saved["shard"])
        table += _of_parameter("packed", INDEX, (-1, GONE))
    else:
        assert len(saved["owner_residual"]) == by_owners
        table += OWNER
    if make is LocalSteps:
        table += _bad_tensors("base", saved["base"])
    holder, merged = holders[:-1], ", or one from merge_states" * (not sharded)
    other = f"state must be {holder} {rank}'s own{merged}, got that of {holder}"
    others = [
        ({**state, holders: {"9": saved_entry}}, f"{other} 9"),
        ({**state, holders: {}}, f"{other} none"),
    ]
    for broken, text in (*_broken(state, table), *others):
        _refuses(run.state.load_state_dict, broken, f"dct::load_state_dict: {text}")
        assert_same_states(run.state.state_dict(), before)
    # A valid state may have unknown keys, tensors that require grad, and strided tensors.
    residual = before[holders][str(rank)]["parameters"][first]["residual"].clone().requires_grad_()
    residual = residual if sharded else torch.stack([residual, residual], 1)[:, 0]
    path = [holders, str(rank)]
    valid = _with(before, [*path, "parameters", first, "residual"], residual)
    if by_owners and not sharded:
        owned = (
            before[holders][str(rank)]["parameters"][first]["owner_residual"][0]
            .clone()
            .requires_grad_()
        )
        valid = _with(valid, [*path, "parameters", first, "owner_residual"], (owned,))
    run.state.load_state_dict(_with(valid, [*path, "other"], object()))
    assert_same_states(run.state.state_dict(), before)
    for step in range(3, 6):
        assert torch.equal(run.step(_numbers(step, rank)), twin.step(_numbers(step, rank)))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("make", [Hook, LocalSteps, Sharded])
def test_entry_points_refuse_invalid_states(make, transport):
    mesh = {"mesh": (2, 1)} if make is Sharded else {}
    run_ranks(_check_refusals, 2, make, {"transport": transport, **mesh})


@on_ranks(2)
def test_load_merged_refuses_invalid_folders(rank, tmp_path):
    """Invalid folders: other models, corruption, missing replicas, other reductions or shards.

    All ranks reject a folder even if only one rank reads the corrupted part.
    """

    def made(sizes, mesh=(2, 1)):
        return Sharded(sizes, mesh, density=0.05, start_step=0)

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
    saved["list"], saved["five"] = _with(state, [*keys, path[0]], [1]), _with(state, keys, 5)
    dcp.save(saved, checkpoint_id=tmp_path)
    damaged = next(row[2] for row in _bad_tensors("@", good) if row[2].endswith(" nan"))
    damaged = damaged.replace("@ of @%", "residual of p.0")
    mismatch = "Size mismatch between saved torch.Size([40, 8]) and current: torch.Size([9, 9])"
    for sizes, key, text in (
        (SIZES, "other", f"key must be the name of a state in {tmp_path}, got 'other'"),
        (SIZES, "early", f"version {VERSION} 5"),
        (SIZES, "five", f"key must be the name of a state in {tmp_path}, got 'five'"),
        (SIZES, "list", f"parameters must be {BY_NAME}, got [1]"),
        (
            SIZES,
            "complex",
            damaged.replace("float32 [40, 8] DTensor with nan", "complex64 [40, 8] T"),
        ),
        (SIZES, "nan", damaged),
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
    run = made(SIZES, mesh=(1, 2))
    before = run.state.state_dict()
    with pytest.raises((ValueError, RuntimeError)) as error:
        run.state.load_merged(tmp_path, key="nan")
    prefix = "dct::load_merged: every rank must take part, got ValueError from rank 0: " * rank
    shard = damaged.replace("local part a float32 [40, 8]", "local part a float32 [20, 8]")
    assert str(error.value) == f"{prefix}dct::load_merged: {shard}"
    assert_same_states(run.state.state_dict(), before)
    run = made(SIZES[:1], mesh=(1, 2))
    files = [None, None]
    dist.all_gather_object(files, through_a_file(run.state.state_dict()))
    text = f"dct::load_state_dict: state must be that of shard {rank}, got that of shard {1 - rank}"
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
    flush = "with step_ahead (or flush, and start a new averager), got"
    transport = f"transport must be reduce_scatter, as in the saved run, {flush} all_gather"
    merged = f"state must be rank {rank}'s own {flush} one from merge_states"
    for settings, saved, text in (
        ({"transport": "all_gather"}, state, transport),
        ({"step_ahead": False}, state, f"step_ahead must be False, {FIT}, got True"),
        ({}, merge_states(both), merged),
    ):
        run = made(**settings)
        before = run.state.state_dict()
        _refuses(run.state.load_state_dict, saved, f"dct::load_state_dict: {text}")
        assert_same_states(run.state.state_dict(), before)
    made().state.load_state_dict(state_of(made(transport="all_gather")))


def _state(rank, world_size=2, **changes):
    residuals = {"residual": torch.full((320,), float(rank)), "owner_residual": ()}
    numbers = {"run_id": "a", "world_size": world_size, "local_size": 1, "step": 5, "density": 0.1}
    parts = {"buckets": [["p"]], "parameters": {"p": residuals}, **changes}
    return {"version": 6, "ranks": {str(rank): {**numbers, **parts}}}


def test_merge_states_refuses_invalid_states(tmp_path):
    good = [_state(0), _state(1)]
    merged = merge_states(good)
    assert entry(merged)["parameters"]["p"]["residual"].tolist() == [0.5] * 320
    residual = entry(good[1])["parameters"]["p"]["residual"]
    rows = [*_rows(OF_RANK), *DICTS, *OWNER, *_bad_tensors("residual", residual)]
    for broken, text in _broken(good[1], rows, " of rank 1"):
        _refuses(merge_states, [good[0], broken], f"dct::merge_states: {text}")
    longer = {"p": {"residual": torch.zeros(3), "owner_residual": ()}}
    size = f"must be {TENSOR}, got float32 [3] Tensor"
    for states, text in (
        ([], "states must be those of all ranks, got none"),
        ([good[0]], "states must be those of all 2 ranks, got rank 0"),
        ([good[0], _state(7)], "states must be those of all 2 ranks, got ranks 0, 7"),
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
    with pytest.raises(TypeError, match=f"^dct::merge_states: states must be {rule}, got 5$"):
        merge_states(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = {"dct": good[0], "early": {**good[0], "version": 5}}
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    rule = "folder must be a folder that torch.distributed.checkpoint wrote, got"
    for file in (tmp_path / "absent", next(tmp_path.glob("*.distcp"))):
        _refuses(merge_states, file, f"dct::merge_states: {rule} {file!r}")
    absent = f"key must be the name of a state in {tmp_path}, got 'other'"
    for key, text in (("other", absent), ("early", f"version {VERSION} 5")):
        _refuses(partial(merge_states, tmp_path), key, f"dct::merge_states: {text}")


def test_merged_residual_is_the_mean_over_nodes():
    """Each rank of a node holds a part. Owner residuals are added to the mean, in float64."""
    generator = torch.Generator().manual_seed(0)
    nodes, owned = (torch.randn(n, 1000, generator=generator) for n in (2, 4))
    for owners in (False, True):
        states = []
        for rank, (low, high) in enumerate([(0, 600), (600, 1000)] * 2):
            part = torch.zeros(1000)
            part[low:high] = nodes[rank // 2, low:high]
            saved = {"residual": part, "owner_residual": tuple(owned[rank : rank + owners])}
            states.append(_state(rank, 4, local_size=2, parameters={"p": saved}))
        merged = entry(merge_states(states))
        expected = nodes.double().mean(0) + (owned.double().sum(0) if owners else 0)
        assert torch.equal(merged["parameters"]["p"]["residual"], expected.float())
        assert merged["local_size"] == 1 and merged["parameters"]["p"]["owner_residual"] == ()


@pytest.mark.parametrize("point", [Hook, LocalSteps])
def test_sparse_and_dense_states_are_not_interchangeable(one_rank, point):
    """The error names the kind of format, not only the density."""
    sparse, dense = point([5000], density=0.01), point([5000], density=1, format="int4")
    every, largest = "all entries", "the largest entries (density 0.01)"
    for run, saved, expected, found in (
        (dense, sparse, f"{every}, as in this run ('int4')", largest),
        (sparse, dense, f"{largest}, as in this run ('bfloat16')", every),
    ):
        text = f"dct::load_state_dict: format must send {expected}, got a state of {found}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            run.state.load_state_dict(saved.state.state_dict())
