"""Checkpoints: bitwise resume, and loads with other transports, formats and numbers of ranks."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dct_parallel import DCTAverager, merge_states
from support.entry_points import Hook, LocalSteps, NodeMesh, Sharded
from support.nodes import TRANSPORTS, rank_sum
from support.ranks import assert_same_states, entry, integers, on_ranks, run_ranks

# An odd number of rows, one row for two shards, a small tensor, and more than one block.
SIZES = ((301, 7), (1, 900), (31,), (20_000,))
NUMEL = 2107 + 900 + 31 + 20_000


def _numbers(step, rank):
    """Return integers, whose sums and means over 2 or 4 ranks are exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-60, 61, (NUMEL,), generator=generator).float()


def _load(entry, source, saved, converted=False):
    if source == "file":
        entry.load(saved)
    elif source == "state only":
        entry.state.load_state_dict(saved["dct"])
    elif converted and isinstance(entry, Sharded):
        entry.state.load_merged(saved)
    else:
        dcp.load(entry.parts(), checkpoint_id=saved)


def _check_resume(rank, make, options, folder):
    """Compare runs that resume from files and DCP folders with an uninterrupted run.

    With step_ahead, a state that was saved right after an averaging also restores the weights. A
    state that was saved between two averagings does not, so the caller loads the weights.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # raised by DCP
    for transport in TRANSPORTS:
        settings = {"density": 0.02, "transport": transport, **options}
        undisturbed, saving = (make(SIZES, **settings) for _ in range(2))
        saved, results = {}, []
        for step in range(9):
            if step in (1, 5) or (step == 3 and "period" in options):
                path = folder / f"{transport} {step}"
                dcp.save(saving.parts(), checkpoint_id=path)
                saved[step] = {"file": saving.file(), "dcp": path}
                if step == 3 and options["step_ahead"]:
                    saved[step]["state only"] = saved[step]["file"]
            results.append(undisturbed.step(_numbers(step, rank)))
            assert torch.equal(saving.step(_numbers(step, rank)), results[-1])
        for start, checkpoints in saved.items():
            for source, checkpoint in checkpoints.items():
                resumed = make(SIZES, **settings)
                if "period" in options and start != 3:
                    _load(resumed, "state only", checkpoints["file"])
                    assert not resumed.weights().any()
                _load(resumed, source, checkpoint)
                assert resumed.state.step == start
                assert_same_states(resumed.state.state_dict(), checkpoints["file"]["dct"])
                for step in range(start, start + 4):
                    assert torch.equal(resumed.step(_numbers(step, rank)), results[step]), source
        last, ended = saving.state.state_dict(), resumed.state.state_dict()
        assert entry(ended)["run_id"] != entry(last)["run_id"]
        entry(ended)["run_id"] = entry(last)["run_id"]
        assert_same_states(ended, last)
        assert undisturbed.pending().count_nonzero() > 1000


SMALL = {"bucket_cap_mb": 0.02}


@pytest.mark.parametrize(
    "make, ranks, options",
    [
        (Hook, 2, SMALL),
        (NodeMesh, 4, SMALL),
        (Sharded, 4, {}),
        (LocalSteps, 2, {}),
        (LocalSteps, 2, {"period": 3, "step_ahead": False, "dtype": torch.bfloat16}),
        (LocalSteps, 2, {"period": 3, "step_ahead": True, "dtype": torch.bfloat16}),
    ],
)
def test_resumed_run_is_bitwise_equal(make, ranks, options, tmp_path):
    run_ranks(_check_resume, ranks, make, options, tmp_path)


SAVED_BUCKETS = [  # parameters of the saved buckets, names of the exchanges in the first step
    ([[0], [1], [2], [3], [4], [5]], [f"saved bucket {index}" for index in (4, 5, 2, 3, 0, 1)]),
    ([[1, 3], [4], [5], [2, 0]], ["saved bucket 1", "saved bucket 2", "bucket 1", "bucket 2"]),
    ([[4, 5], [0, 2], [3, 1]], ["bucket 0", "bucket 1", "bucket 2"]),
]


@pytest.mark.parametrize(
    "transport, executor", [("all_gather", "Inline"), ("reduce_scatter", "Thread")]
)
@on_ranks(2)
def test_first_steps_after_a_load_lose_nothing(rank, transport, executor):
    """DDP has buckets of parameters [4, 5], [2, 3] and [0, 1], other than the saved buckets."""
    sizes = (4096,) * 6
    settings = {"density": 0.05, "start_step": 0, "transport": transport}
    numbers = [torch.cat(integers(sizes, step, rank)) for step in range(5)]
    saving = Hook(sizes, **settings)
    for step in range(2):
        saving.step(numbers[step])
    for saved, names in SAVED_BUCKETS:
        point, file = Hook(sizes, bucket_cap_mb=2**-5, unused=True, **settings), saving.file()
        entry(file["dct"])["buckets"] = [[f"p.{index}" for index in bucket] for bucket in saved]
        point.load(file)
        assert type(point.state._executor).__name__ == f"{executor}Executor"
        for step in range(2, 5):
            point.step(numbers[step])
            exchanges, mean = [*point.state._ledger._exchanges], rank_sum(sum(numbers[: step + 1]))
            found = saving.applied + point.applied + point.pending()
            assert torch.equal(found, mean.double() / 2)
            assert exchanges == (names if step == 2 else ["bucket 0", "bucket 1", "bucket 2"])


@on_ranks(2)
def test_one_bucket_takes_over_the_residuals_of_many_saved_buckets(rank):
    sizes, settings = (4096,) * 6, {"density": 0.05, "start_step": 0}
    numbers = [torch.cat(integers(sizes, step, rank)) for step in range(6)]
    saving, point = Hook(sizes, bucket_cap_mb=2**-7, **settings), Hook(sizes, **settings)
    for step in range(3):
        saving.step(numbers[step])
    point.load(saving.file())
    for step in range(3, 6):
        point.step(numbers[step])
        found = saving.applied + point.applied + point.pending()
        assert torch.equal(found, rank_sum(sum(numbers[: step + 1])).double() / 2), step
    assert [len(run.state._buckets.in_order()) for run in (saving, point)] == [6, 1]


def _assert_near(now, before):
    torch.testing.assert_close(now, before, rtol=0, atol=1e-6 * before.abs().max().item())


def _check_conversion(rank, make, folder):
    """Check that all numbers are applied or pending before a save, after the load, and later."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # raised by DCP
    float32, int4 = {"density": 0.05, "format": "float32"}, {"density": 1, "format": "int4"}
    for settings, others, (saved, loaded) in (
        (float32, {"density": 0.05}, TRANSPORTS),
        (int4, int4, TRANSPORTS[::-1]),
    ):
        entry, total = make(SIZES, transport=saved, **settings, start_step=0), 0
        for step in range(4):
            entry.step(_numbers(step, rank))
            total = total + _numbers(step, rank).double()
        total, pending = rank_sum(total) / dist.get_world_size(), entry.pending()
        _assert_near(entry.applied + pending, total)
        assert pending.count_nonzero() > 0.8 * NUMEL
        path = folder / f"{saved} {settings}"
        dcp.save(entry.parts(), checkpoint_id=path)
        change = f"transport {saved}.* transport {loaded}"
        if settings is float32:
            change = f"format float32 and transport {saved}.* format bfloat16 and transport"
        for source, checkpoint in (("file", entry.file()), ("dcp", path)):
            again = make(SIZES, transport=loaded, **others, start_step=0)
            with pytest.warns(UserWarning, match=f"state was saved with {change}") as warned:
                _load(again, source, checkpoint, converted=True)
            assert len([w for w in warned if "was saved with" in str(w.message)]) == 1
            again.applied = entry.applied
            _assert_near(again.pending(), pending)
            for _ in range(3):
                again.step(torch.zeros(NUMEL))
            _assert_near(again.applied + again.pending(), total)
            assert (again.applied - entry.applied).count_nonzero() > 1000
        with pytest.warns(UserWarning, match="to keep the saved settings, pass them"):
            _load(again, source, checkpoint, converted=True)  # into buckets that are in use
        _assert_near(again.pending(), pending)


@pytest.mark.parametrize("make, ranks", [(Hook, 2), (NodeMesh, 4), (Sharded, 4), (LocalSteps, 2)])
def test_state_loads_into_a_different_transport_and_format(make, ranks, tmp_path):
    run_ranks(_check_conversion, ranks, make, tmp_path)


BY_OWNERS = {"transport": "reduce_scatter"}
INT4 = {"format": "int4", "density": 1}  # the default transport depends on the number of replicas
MERGED = [  # (ranks, entry point, settings) of the saving run, and of each loading run
    ((1, Hook, {}), [(2, Hook, {})]),
    ((2, Hook, {}), [(1, Hook, {}), (4, Hook, {}), (4, NodeMesh, {})]),
    ((2, Hook, BY_OWNERS), [(1, Hook, BY_OWNERS), (4, NodeMesh, {}), (4, Hook, BY_OWNERS)]),
    ((2, LocalSteps, {}), [(4, LocalSteps, {})]),
    ((2, Sharded, {"mesh": (2, 1)} | BY_OWNERS), [(2, Sharded, {"mesh": (1, 2)} | BY_OWNERS)]),
    ((2, Sharded, {"mesh": (1, 2)}), [(2, Sharded, {"mesh": (2, 1)})]),
    ((4, Hook, BY_OWNERS), [(2, NodeMesh, {}), (2, Hook, BY_OWNERS)]),
    ((4, NodeMesh, {}), [(2, NodeMesh, {}), (2, Hook, BY_OWNERS)]),
    ((4, NodeMesh, BY_OWNERS), [(2, NodeMesh, {}), (2, Hook, {})]),
    ((4, LocalSteps, BY_OWNERS), [(2, LocalSteps, {})]),
    ((4, Sharded, {"mesh": (2, 2)}), [(2, Sharded, {"mesh": (2, 1)})]),
    ((4, Sharded, {"mesh": (4, 1)}), [(2, Sharded, {"mesh": (2, 1)})]),
    ((4, Sharded, {"mesh": (4, 1)} | INT4), [(4, Sharded, {"mesh": (2, 2)} | INT4)]),
]


def _make(make, settings):
    return make(SIZES, start_step=0, **{"density": 0.05} | settings)


def _save(rank, jobs):
    """Return (applied, pending, the exact mean, this rank's checkpoint) of each job."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # raised by DCP
    found = []
    for make, settings, folder in jobs:
        entry = _make(make, settings)
        for step in range(4):
            entry.step(_numbers(step, rank))
        total = rank_sum(sum(_numbers(step, rank).double() for step in range(4)))
        dcp.save({"app": {"dct": entry.state.state_dict()}}, checkpoint_id=folder)
        file = None if make is Sharded else entry.file()  # DTensors need their mesh
        found.append((entry.applied, entry.pending(), total / dist.get_world_size(), file))
    return found


def _load_and_check(rank, jobs):
    for make, settings, folder, merged, (applied, pending, total, file) in jobs:
        entry = _make(make, settings)
        if make is Sharded:
            with torch.device("meta"):  # DCP computes shard offsets on the default device
                entry.state.load_merged(folder, key="app.dct")
        else:
            entry.load({**file, "dct": merged})
        assert entry.state.step == 4
        entry.applied = applied
        _assert_near(entry.pending(), pending)
        for _ in range(3):
            entry.step(torch.zeros(NUMEL))
        _assert_near(entry.applied + entry.pending(), total)
        assert (entry.applied - applied).count_nonzero() > 500, (make, settings)


def test_merged_state_loads_on_a_different_number_of_ranks(tmp_path):
    loads = {1: [], 2: [], 4: []}
    for ranks in loads:
        cases = [(saver[1:], loaders) for saver, loaders in MERGED if saver[0] == ranks]
        folders = [tmp_path / f"{ranks} {number}" for number in range(len(cases))]
        jobs = [(*saver, folder) for (saver, _), folder in zip(cases, folders, strict=True)]
        by_rank = run_ranks(_save, ranks, jobs)
        for case, (_, loaders) in enumerate(cases):
            found, merged = by_rank[0][case], None
            if jobs[case][0] is not Sharded:
                merged = merge_states(every[case][3]["dct"] for every in reversed(by_rank))
                with torch.device("meta"):  # DCP computes shard offsets on the default device
                    from_folder = merge_states(folders[case], key="app.dct")
                assert_same_states(merged, from_folder)
                for name, parts in entry(merged)["parameters"].items():
                    saved = entry(found[3]["dct"])["parameters"][name]
                    assert parts["owner_residual"] == () and parts.keys() == saved.keys()
                    assert "base" not in saved or torch.equal(parts["base"], saved["base"])
            for others, make, settings in loaders:
                loads[others].append((make, settings, folders[case], merged, found))
    for ranks, jobs in loads.items():
        run_ranks(_load_and_check, ranks, jobs)


CALLS = {
    Hook: ["dct_hook"],
    Sharded: ["dct_fully_shard_hook"],
    LocalSteps: ["average_parameters", "flush"],
}


def _load_different_states(rank, make, settings):
    saved, calls = {}, CALLS[make]
    for name in "ab":
        run = make(SIZES, density=0.05, start_step=0, **settings)
        for step in range(4):
            saved[f"{name}{step}"] = run.state.state_dict()
            run.step(_numbers(step, rank))
    for name in "xy":  # two attempts to continue from the same states
        run = make(SIZES, density=0.05, start_step=0, **settings)
        run.state.load_state_dict(saved["a2"])
        assert entry(run.state.state_dict())["run_id"] == entry(saved["a2"])["run_id"]
        for step in range(2, 4):
            run.step(_numbers(step, rank))
        saved[f"{name}4"] = run.state.state_dict()
    saved["other"] = copy.deepcopy(saved["x4"])
    changed = entry(saved["other"])
    if make is Hook:  # two parameters in the opposite order
        changed["buckets"][0].reverse()
    elif make is Sharded:
        changed["shards"] = 5
    else:
        changed["parameters"]["0"]["base"][3] += 1  # a different base on rank 1
    other = {Hook: "buckets of the checkpoint", Sharded: "shards of the checkpoint"}
    other = other.get(make, "loaded weights")
    for loads, text in (
        (("a2", "a3"), "step must be the same on every rank, got 2 on rank 0, 3 on rank 1"),
        ((None, "a3"), "checkpoint must be .*, got none on rank 0, one of 2 ranks on rank 1"),
        (("a3", "b3"), "run_id must be the same on every rank, got .* on rank 0, .* on rank 1"),
        (("x4", "y4"), "run_id must be the same on every rank, got .* on rank 0, .* on rank 1"),
        (("x4", "other"), f"{other} must be the same on every rank, got "),
    ):
        for op in calls:
            run = make(SIZES, density=0.05, start_step=0, **settings)
            if loads[rank] is not None:
                run.state.load_state_dict(saved[loads[rank]])
            with pytest.raises(ValueError, match=f"dct::{op}: {text}"):
                if op == "flush":
                    run.state.flush()
                for step in range(2):  # with period 2, ranks average in different calls
                    run.step(_numbers(step, rank))


@pytest.mark.parametrize(
    "make, settings", [(Hook, {}), (Sharded, {"mesh": (2, 1)}), (LocalSteps, {"period": 2})]
)
def test_loading_different_states_raises(make, settings):
    run_ranks(_load_different_states, 2, make, settings)


@on_ranks(1)
def test_state_of_a_compiled_module_loads_into_an_eager_one(rank):
    """torch.compile adds the `_orig_mod` prefix. The period is the largest that is allowed."""
    model = nn.Linear(30, 30)
    averager = DCTAverager(nn.ModuleDict({"_orig_mod": model}), period=2**31 - 1)
    averager.average_parameters()
    again = DCTAverager(model, period=2**31 - 1)
    again.load_state_dict(averager.state_dict())
    assert again.step == 1
    assert list(entry(averager.state_dict())["parameters"]) == ["weight", "bias"]
