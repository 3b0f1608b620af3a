"""States that commit 6004d3a saved load bit for bit. states/write.py wrote them."""

import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dct_embeddings import merge_feature_rows
from dct_parallel import merge_states
from ranks import entry, run_ranks
from states import write

TRANSPORTS = {"gather": "all_gather", "shard": "reduce_scatter"}  # {name there: name now}
STATES = Path(__file__).parent / "states" / "6004d3a.zip"


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    with zipfile.ZipFile(STATES) as archive:
        archive.extractall(folder)
    return folder


def _load(path):
    return torch.load(path, weights_only=True)


def _require_same(ours, theirs, where=""):
    """Equal, and tensors bit for bit."""
    if isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, where
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (ours, theirs)]
        assert torch.equal(*bits), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in theirs.items():
            _require_same(ours[key], value, f"{where}/{key}")
    elif isinstance(theirs, list):
        _require_same(dict(enumerate(ours)), dict(enumerate(theirs)), where)
    else:
        assert ours == theirs, where


def _kept(own):
    """An entry without the thresholds, which are found anew."""
    kept = {"residual", "owner_residual", "base", "packed", "shard"}
    parameters = {
        name: {key: value for key, value in parts.items() if key in kept}
        for name, parts in own["parameters"].items()
    }
    return own | {"parameters": parameters}


def _non_zero(own, key):
    return sum(int(parts[key].count_nonzero()) for parts in own["parameters"].values())


def _data_parallel(rank, states, *cases):
    for version, name, local_size in cases:
        saved = _load(states / f"version{version}" / f"rank{rank}.pt")
        assert saved["version"] == version
        model, state = write.data_parallel(TRANSPORTS[name], local_size)
        for step in range(2):  # DDP deals its buckets as it had
            model(*write.gradients(write.SIZES, step, rank)).backward()
        state.load_state_dict(saved)
        assert state.step == write.STEPS
        now = state.state_dict()
        assert now["version"] == version
        _require_same(entry(now), _kept(entry(saved)), f"version {version}")
        assert _non_zero(entry(saved), "residual") > 5000
        if name == "shard":
            assert _non_zero(entry(saved), "owner_residual") >= 10
        _require_in_use(model, state, entry(saved), f"version {version}")


def _require_in_use(model, state, saved, where):
    """That a step goes on from what was loaded: one without gradients, taken back, leaves it."""
    model.zero_grad()
    model(*map(torch.zeros, write.SIZES)).backward()
    state.take_back()
    now = entry(state.state_dict())
    assert now["step"] == write.STEPS + 1
    for name, parts in saved["parameters"].items():
        loaded = now["parameters"][name]
        assert torch.equal(loaded["residual"], parts["residual"]), (where, name)  # but for -0.0
        if "owner_residual" in parts:  # where something was summed, to rounding
            was, found = parts["owner_residual"], loaded["owner_residual"]
            torch.testing.assert_close(found, was, rtol=0, atol=1e-6)
    state.close()


def _merged(rank, states, *versions):
    for version in versions:
        merged = _load(states / f"version{version}" / "merged.pt")
        model, state = write.data_parallel(TRANSPORTS["gather"], None)
        state.load_state_dict(merged)
        for name, parts in entry(merged)["parameters"].items():
            loaded = entry(state.state_dict())["parameters"][name]
            _require_same(loaded["residual"], parts["residual"], name)
        _require_in_use(model, state, entry(merged), f"merged {version}")


def _averaged(rank, states):
    saved = _load(states / "averager" / f"rank{rank}.pt")
    _, averager = write.averaged()
    averager.load_state_dict(saved)
    assert averager.step == write.STEPS
    own = {"period": 2, "residual_decay": 1.0, "overlap": 0}
    _require_same(entry(averager.state_dict()), own | _kept(entry(saved)))
    assert _non_zero(entry(saved), "residual") > 100 and _non_zero(entry(saved), "base") > 10


def _on_two_ranks(rank, states):
    _data_parallel(rank, states, (2, "gather", None), (3, "shard", None))
    _merged(rank, states, 2, 5)
    _averaged(rank, states)


def test_of_data_parallel_ranks(states):
    run_ranks(_on_two_ranks, 2, states)


def test_of_nodes(states):
    run_ranks(_data_parallel, 4, states, (4, "gather", 2), (5, "shard", 2))


@pytest.mark.parametrize("version, ranks", [(2, 2), (5, 4)])
def test_merged_as_they_were(states, version, ranks):
    folder = states / f"version{version}"
    merged = merge_states(_load(folder / f"rank{rank}.pt") for rank in range(ranks))
    then = _load(folder / "merged.pt")
    assert merged["version"] == then["version"]
    _require_same(entry(merged), _kept(entry(then)))


def _from_folder(folder):
    """{path: value} of all that DCP keeps there, tensors in full, without any class of ours."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    values = {
        key: torch.empty(of.size, dtype=of.properties.dtype) if hasattr(of, "size") else None
        for key, of in metadata.state_dict_metadata.items()
    }
    dcp.load(values, checkpoint_id=folder, no_dist=True)
    return {metadata.planner_data[key]: value for key, value in values.items()}


def _fully_sharded(rank, states):
    for name, now in TRANSPORTS.items():
        folder, shapes = states / f"fully_sharded_{name}", write.SHAPES[name]
        _, state = write.fully_sharded(now, shapes)
        dcp.load({"dct": state}, checkpoint_id=folder)
        ((replica, own),) = state.state_dict()["replicas"].items()
        assert replica == str(rank // 2) and own["step"] == write.STEPS
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        saved = _from_folder(folder)
        for key in own.keys() - {"parameters", "transport"}:
            assert own[key] == saved["dct", "replicas", replica, key], key
        found = 0
        for parameter, parts in own["parameters"].items():
            assert {"residual"} <= parts.keys() and ("owner_residual" in parts) == (name == "shard")
            for key, value in parts.items():
                full = value.full_tensor() if key != "packed" else value
                path = "dct", "replicas", replica, "parameters", parameter, key
                _require_same(full, saved[path], f"{name} {path}")
                found += int(full.count_nonzero())
        assert found > 100


def _tables(rank, states):
    saved = _load(states / "two_dimensional" / f"rank{rank}.pt")
    bags, optimizer = write.tables(seed=1)
    bags.load_state_dict(saved["bags"])
    optimizer.load_state_dict(saved["optimizer"])
    _require_same(bags.state_dict(), saved["bags"])
    # Their squares were halved before they were accumulated; now sums are, where they are used.
    (group,) = saved["optimizer"]["param_groups"]
    assert group.pop("accumulator_scale") == 0.5 and group["eps"] == 1e-8
    group |= {"scale": 2, "eps": 1e-8**2}
    sums = saved["optimizer"]["state"][0]
    assert sums.keys() == {"sum", "pending"} and all(value.any() for value in sums.values())
    saved["optimizer"]["state"][0] = {name: 2 * value for name, value in sums.items()}
    _require_same(optimizer.state_dict(), saved["optimizer"])


def _on_a_mesh(rank, states):
    _fully_sharded(rank, states)
    _tables(rank, states)


def test_of_shards_and_replicas(states):
    run_ranks(_on_a_mesh, 4, states)


def _features(rank, states):
    for folder, kind in (("feature_rows", "static"), ("dynamic_rows", "dynamic")):
        saved = _load(states / folder / f"rank{rank}.pt")
        rows, optimizer = write.features(kind, seed=1)
        if kind == "dynamic":
            rows.attach("sum", optimizer, "sum")
        optimizer.load_state_dict(saved["optimizer"])
        rows.load_state_dict(saved["rows"])
        _require_same(rows.state_dict(), saved["rows"])
        _require_same(optimizer.state_dict(), saved["optimizer"])
        assert saved["optimizer"]["state"][0]["sum"].count_nonzero() > 10
    # Rows of all ranks, of which this one takes its own.
    again, optimizer = write.features("dynamic", seed=1)
    again.attach("sum", optimizer, "sum")
    again.load_state_dict(_load(states / "dynamic_rows" / "merged.pt"))
    loaded = again.state_dict()
    order, then = (state["ids"].argsort() for state in (loaded, saved["rows"]))
    for key in loaded.keys() - {"owner"}:
        _require_same(loaded[key][order], saved["rows"][key][then], key)


def test_of_feature_rows(states):
    run_ranks(_features, 2, states)
    folder = states / "dynamic_rows"
    merged = merge_feature_rows([_load(folder / f"rank{rank}.pt")["rows"] for rank in range(2)])
    _require_same(merged, _load(folder / "merged.pt"))
