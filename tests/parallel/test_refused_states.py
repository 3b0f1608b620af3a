"""States that are broken: refused by name on every door, and then nothing has changed."""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dct_parallel import DCTAverager, DCTState, dct_fully_shard_hook, dct_hook, merge_states
from ranks import assert_same, batch, ddp, mlp, on_ranks, shard_mesh, train_step

GONE = object()
WEIGHT = "0.weight"  # of 32 x 32 elements

OWNER = ["parameters", WEIGHT, "owner_residual"]
INTEGER = r"an integer in \[0, 2147483647\], got "
ENTRY = [  # (keys below a rank's entry, what is put there, what the error says)
    (["step"], -3, f"step must be {INTEGER}-3"),
    (["step"], 6.5, rf"step must be {INTEGER}6\.5"),
    (["step"], "x", f"step must be {INTEGER}'x'"),
    (["step"], 2**40, f"step must be {INTEGER}1099511627776"),
    (["step"], GONE, f"step must be {INTEGER}nothing"),
    (["run_id"], GONE, "run_id must be a string, got nothing"),
    (["run_id"], 5, "run_id must be a string, got 5"),
    (["world_size"], GONE, "world_size must be an integer in .*, got nothing"),
    (["world_size"], "2", "world_size must be an integer in .*, got '2'"),
    (["density"], GONE, r"density must be a number in \(0, 1\], got nothing"),
    (["density"], math.nan, r"density must be a number in \(0, 1\], got nan"),
    (["parameters"], GONE, "parameters must be a dict with strings as keys, got nothing"),
    (["parameters"], [1], r"parameters must be a dict with strings as keys, got \[1\]"),
    (["parameters", WEIGHT], 7, f"state of {WEIGHT} must be a dict, got int"),
]


FLAT = [  # also of states that are not of shards
    (["local_size"], GONE, "local_size must be an integer in .*, got nothing"),
    (["local_size"], 0, "local_size must be an integer in .*, got 0"),
    (OWNER, GONE, f"owner_residual of {WEIGHT} must be a tuple, empty or with .*, got nothing"),
    (OWNER, torch.zeros(1024), f"owner_residual of {WEIGHT} must be a tuple.*, got Tensor"),
    (OWNER, (torch.zeros(1024),) * 2, f"owner_residual of {WEIGHT} must be .*, got 2 values"),
    (OWNER, (torch.zeros(3),), rf"owner_residual of {WEIGHT} must be .*, got float32 \[3\]"),
    (OWNER, (torch.full((1024,), math.nan),), f"owner_residual of {WEIGHT} must be .*, got nan"),
]


def _of_tensors(saved, **gone):
    """What must not stand in place of the tensors that are saved of one weight.

    Args:
        gone: {key: what the error says if it is left out}, where that is not of the key.
    """
    flaws = []
    for key, good in saved.items():
        if isinstance(good, tuple):
            continue
        values = {
            "str": "x",
            "Tensor" if isinstance(good, DTensor) else r"float32 \[3\]": torch.zeros(3),
            "float64": good.double(),
            "nan": torch.full_like(good, math.nan),
            "inf": torch.full_like(good, math.inf),
        }
        texts = {got: f"{key} of {WEIGHT} must be .*, got {got}" for got in [*values, "nothing"]}
        values["nothing"] = GONE
        texts["nothing"] = gone.get(key, texts["nothing"])
        flaws += [(["parameters", WEIGHT, key], values[got], texts[got]) for got in values]
    return flaws


def _with(state, path, value):
    """A copy of the dicts, in which something else stands there."""
    key, *below = path
    if value is GONE and not below:
        return {k: v for k, v in state.items() if k != key}
    return {**state, key: _with(state[key], below, value) if below else value}


def _broken(state, flaws):
    """(a broken copy of a rank's state, what the error says) for every flaw."""
    top = next(key for key in state if key != "version")
    (rank,) = state[top]
    yield [1], "state must be a dict, got list"
    yield None, "state must be a dict, got NoneType"
    yield {}, "version must be .*, got nothing"
    yield {**state, "version": 9}, "version must be .*, got 9"
    for early in range(1, 6):
        rule = r"version must be 6, as dct_kernels 0\.3 saves it \(earlier states are not read\)"
        yield {**state, "version": early}, f"{rule}, got {early}"
    yield {**state, "version": True}, "version must be .*, got True"
    yield {**state, top: [1]}, rf"{top} must be a dict with strings as keys, got \[1\]"
    yield {**state, top: {rank: [1]}}, "state must be a dict, got list"
    for path, value, text in flaws:
        yield _with(state, [top, rank, *path], value), text


def _bits(state):
    """{path: a number, string or list of numbers}, to be compared."""
    bits = {}
    for key, value in state.items():
        if isinstance(value, dict):
            bits |= {(key, *path): leaf for path, leaf in _bits(value).items()}
        elif isinstance(value, tuple):
            bits[key,] = [tensor.tolist() for tensor in value]
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            bits[key,] = local.double().nan_to_num(-7).tolist()
        else:
            bits[key,] = value
    return bits


def _refuses(holder, state, flaws):
    """Whether `holder` refused `state` with each of the flaws, and is as it was."""
    before, step = _bits(holder.state_dict()), holder.step
    for broken, text in _broken(state, flaws):
        with pytest.raises((TypeError, ValueError), match=f"dct::load_state_dict: {text}"):
            holder.load_state_dict(broken)
        assert holder.step == step and _bits(holder.state_dict()) == before, text


def _weights(model):
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def _refuses_and_goes_on(rank, make, flaws):
    """It tries them in the middle of a run; a twin that is left alone ends with the same weights.

    Args:
        make: (model, what has a state, optimizer, what follows each step).
        flaws: of (the state, what it saved of one weight).
    """
    model, holder, optimizer, then = make()
    twin, _, its, too = make()
    for step in range(7):
        train_step(model, optimizer, *batch(step, rank, 32))
        then()
        train_step(twin, its, *batch(step, rank, 32))
        too()
        if step == 4:
            state = holder.state_dict()
            (entry,) = next(value for key, value in state.items() if key != "version").values()
            _refuses(holder, state, flaws(entry))
            top = next(key for key in state if key != "version")
            with pytest.raises(ValueError, match=r"state must be (rank|replica) .*, got that of"):
                holder.load_state_dict({**state, top: {"9": entry}})
            holder.load_state_dict(state)
    assert torch.equal(_weights(model), _weights(twin))


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
@on_ranks(2)
def test_the_hooks_state(rank, transport):
    def make():
        model = ddp(mlp(32, 2))
        # At density 1 results do not depend on how buckets are dealt after a load.
        state = DCTState(model, density=1, format="bfloat16", transport=transport)
        model.register_comm_hook(state, dct_hook)
        return model, state, _sgd(model), lambda: None

    def flaws(entry):
        saved = entry["parameters"][WEIGHT]
        assert len(saved["owner_residual"]) == (transport == "reduce_scatter")
        rule = "buckets must be lists of "
        names = [  # by which the first step would be dealt out
            (["buckets"], "x", f"{rule}strings, got 'x'"),
            (["buckets"], [WEIGHT], f"{rule}strings, got"),
            (["buckets"], [[]], f"{rule}strings, got"),
            (["buckets"], [["other"]], f"{rule}parameters of this model, .*, got other"),
            (
                ["buckets"],
                [[WEIGHT], [WEIGHT]],
                f"{rule}parameters .* once, got {WEIGHT}, {WEIGHT}",
            ),
        ]
        fit = "as in this run"
        others = [  # sound, but of a different run
            (["density"], 0.1, f"density must be 1(.0)?, {fit}, got 0.1"),
            (["world_size"], 3, rf"world_size must be 2, {fit} \(merge_states .*\), got 3"),
            (["local_size"], 2, rf"local_size must be 1, {fit} \(merge_states .*\), got 2"),
            (["parameters"], {WEIGHT: saved}, "parameters must be those .* a difference in 0.bias"),
        ]
        return ENTRY + FLAT + names + others + _of_tensors(saved)

    _refuses_and_goes_on(rank, make, flaws)


@on_ranks(2)
def test_the_averager(rank):
    def make():
        model = mlp(32, 2)
        averager = DCTAverager(model, density=0.1, period=5)
        return model, averager, _sgd(model), averager.average_parameters

    def flaws(entry):
        saved = entry["parameters"]
        bases = torch.cat([saved[WEIGHT]["base"], saved["2.weight"]["base"]])
        moved = {WEIGHT: {**saved[WEIGHT], "base": bases[:1000]}}
        moved |= {"2.weight": {**saved["2.weight"], "base": bases[1000:]}}  # the right total
        return [
            *ENTRY,
            *FLAT,
            *_of_tensors(
                saved[WEIGHT],
                base="state must be a DCTAverager's, got one without",
            ),
            (["shard"], "1 of 2", "shard must be whole, as in this run, got 1 of 2"),
            (["shard"], 1, "shard must be a string, got 1"),
            (["parameters"], saved | moved, f"base of {WEIGHT} must be a float32 .1024. tensor"),
            (["period"], 3, "period must be 5, as in this run, got 3"),
            (["period"], 0, "period must be an integer in .*, got 0"),
            (["period"], GONE, "period must be 5, as in this run, got none"),
        ]

    _refuses_and_goes_on(rank, make, flaws)


def _sharded(mesh):
    model = fully_shard(mlp(32, 2), mesh=mesh["shard"])
    return model, dct_fully_shard_hook(model, mesh=mesh, density=0.5), _sgd(model), lambda: None


@on_ranks(2)
def test_the_sharded_hooks_state(rank):
    mesh = shard_mesh(2, 1)

    def flaws(entry):
        saved = dict(entry["parameters"][WEIGHT])
        count = ["parameters", WEIGHT, "packed"]
        text = rf"packed of 0.weight must be {INTEGER}"
        tensors = [(count, -1, text + "-1"), (count, GONE, text + "nothing")]
        del saved["packed"]
        tensors += _of_tensors(saved)
        texts = [(["transport"], GONE, "transport must be a string, got nothing")]
        texts += [(["replicas"], 1.5, r"replicas must be an integer in .*, got 1\.5")]
        texts += [(["shards"], GONE, "shards must be an integer in .*, got nothing")]
        return ENTRY + texts + tensors

    _refuses_and_goes_on(rank, lambda: _sharded(mesh), flaws)


@on_ranks(2)
def test_load_merged(rank, tmp_path):
    model, state, optimizer, _ = _sharded(shard_mesh(2, 1))
    for step in range(4):
        train_step(model, optimizer, *batch(step, rank, 32))
    good = state.state_dict()
    residual = good["replicas"][str(rank)]["parameters"][WEIGHT]["residual"]
    if rank == 1:
        residual.to_local()[0, 0] = math.nan
    dcp.save({"dct": good}, checkpoint_id=tmp_path)
    before = _bits(state.state_dict())
    text = rf"dct::load_merged: residual of {WEIGHT} must be .* finite numbers .*, got nan"
    with pytest.raises(ValueError, match=text):
        state.load_merged(tmp_path)
    assert _bits(state.state_dict()) == before
    train_step(model, optimizer, *batch(4, rank, 32))
    assert_same(_weights(model))


def _saved(rank):
    """A rank's state, made by hand."""
    residual = torch.full((1024,), float(rank))
    parts = {"residual": residual, "owner_residual": ()}
    numbers = {"run_id": "a", "world_size": 2, "local_size": 1, "step": 5, "density": 0.1}
    entry = {**numbers, "parameters": {WEIGHT: parts}}
    return {"version": 6, "ranks": {str(rank): entry}}


def test_merge_states():
    good = _saved(1)
    parts = good["ranks"]["1"]["parameters"][WEIGHT]
    for broken, text in _broken(good, ENTRY + FLAT + _of_tensors(parts)):
        what, rule = text.split(" must be ")
        text = f"dct::merge_states: {what}( of rank 1)? must be {rule}"
        with pytest.raises((TypeError, ValueError), match=text):
            merge_states([_saved(0), broken])
    assert merge_states([_saved(0), good])["ranks"]["mean"]["step"] == 5
