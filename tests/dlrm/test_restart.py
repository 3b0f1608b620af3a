"""A command that is killed, whenever that is, and started again ends like one that was not."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from programs import ROOT

from dlrm import arguments, files
from dlrm.checkpoint import MANIFEST
from dlrm.experiment import compare
from dlrm.launch import WorkerError, launch

SMALL = ["--rows", "1500", "--batch-size", "64", "--embedding-dim", "8", "--top", "64"]
SMALL += ["--epochs", "2", "--density", "0.05"]  # 18 steps
SMALL += ["--checkpoint-every", "4", "--resume"]
DLRM = ["--hash-size", "50", "--bottom", "16"]
DATA = ["--modes", "dense,bf16,powersgd,dct", "--optimizer", "momentum", "--lr", "0.01"]
HYBRID = ["--parallel", "hybrid", "--modes", "dct", "--row-format", "int4,sign", "--dedup"]
ADAMW = ["--optimizer", "adamw", "--lr", "0.001", "--embedding-lr", "0.1"]
HYBRID += [*ADAMW, "--embedding-optimizer", "rowwise_adagrad"]
SHARD = ["--modes", "dct", "--transport", "reduce_scatter", *ADAMW]
NODE = [*SHARD, "--local-size", "2"]
TWO_DIMENSIONAL = ["--parallel", "2d", "--modes", "dct", "--sync-every", "3"]
TWO_DIMENSIONAL += ["--sync-density", "0.1", *ADAMW]
TWO_DIMENSIONAL += ["--embedding-optimizer", "momentum_scaled_rowwise_adagrad"]
DES = ["--parallel", "des", "--model", "deepfm", "--modes", "dct", "--multi-hot", "3", *ADAMW]
DES += ["--embedding-optimizer", "rowwise_adagrad"]
DYNAMIC = ["--dynamic-rows", "5000"]
# Inside a node what ranks owe goes to whose part it is once more, after a load.
NOT_BITS = ("step_ms", "node", "density", "density_mean")


def _finished(folder):
    """Each rank's finished runs, [(mode, run)]: what must not differ between two commands."""
    runs = []
    for record in json.loads((folder / MANIFEST).read_text())["files"]:
        saved = torch.load((folder / MANIFEST).with_name(record["name"]), weights_only=True)
        assert saved["training"] is None
        for mode, run in saved["finished"]:
            runs.append((mode, run))
    return runs


def _assert_same(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left.keys() - set(NOT_BITS):
            _assert_same(left[key], right[key])
    else:
        assert left == right


def _assert_same_end(whole, parts, modes, steps):
    """Losses of every step, weights, scores and bytes, bit for bit: the data's order, too."""
    expected, got = _finished(whole), _finished(parts)
    assert [mode for mode, _ in got] == 2 * modes  # of two ranks
    for (mode, run), (_, other) in zip(expected, got, strict=True):
        assert len(run["loss"]) == steps, mode
        _assert_same(run, other)
    left_over = list((parts / MANIFEST).parent.glob("*.pt*"))
    assert len(left_over) == 2, left_over


def _dies(function, wanted, times):
    """`function`, but SIGKILL where it is called for the last of so many `times` it is `wanted`."""
    left = times

    def dying(*args):
        nonlocal left
        left -= wanted(*args)
        if left == 0:
            if function is files.write:
                path, content = args
                path.with_name(f"{path.name}.part").write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    return dying


def _killed(options, rank, where, times):
    """`compare`, on `rank` up to a step of AdamW, or to within the write of a file."""
    if dist.get_rank() == rank and where == "step":
        torch.optim.AdamW.step = _dies(torch.optim.AdamW.step, lambda self: True, times)
    elif dist.get_rank() == rank:
        files.write = _dies(files.write, lambda path, content: path.name == where, times)
    compare(options)


# (rank, where, which time) and the checkpoint that is left.
KILLS = {
    # Within a rank's write, after the other's; within the manifest's, when both ranks are done.
    "data": ([*DLRM, *DATA], [(1, "12-rank1.pt", 1, 11), (0, "manifest.json", 7, 17)]),
    "hybrid": ([*DLRM, *HYBRID], [(0, "step", 14, 3)]),  # between the tables and the MLPs
    "shard": ([*DLRM, *SHARD], [(1, "step", 14, 3)]),
    "node": ([*DLRM, *NODE], [(1, "step", 14, 3)]),
    "2d": ([*DLRM, *TWO_DIMENSIONAL], [(1, "step", 14, 3)]),
    "des": ([*DES, "--hash-size", "50"], [(1, "step", 14, 3)]),
    "rows that appear": ([*DES, *DYNAMIC], [(1, "step", 14, 3)]),
}


SHORT = ("data", "hybrid")


@pytest.mark.parametrize(
    "parallel",
    [pytest.param(name, marks=[] if name in SHORT else pytest.mark.large) for name in KILLS],
)
def test_killed_and_resumed_is_the_undisturbed_run(parallel, tmp_path):
    given, kills = KILLS[parallel]
    options = {}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        options[name] = arguments.parse([*SMALL, *given, "--out", str(tmp_path / name)])
    launch(compare, 2, options["whole"])
    for *kill, left in kills:
        with pytest.raises(WorkerError):
            launch(_killed, 2, options["parts"], *kill)
        # What is there is the last complete one, whatever lies beside it.
        assert json.loads((tmp_path / "parts" / MANIFEST).read_text())["number"] == left
    launch(compare, 2, options["parts"])
    _assert_same_end(tmp_path / "whole", tmp_path / "parts", options["whole"].modes, 18)


# Checkpoints of 30 MB a rank and more after every step: much of the time goes into them.
LARGE = ["--rows", "9000", "--batch-size", "64", "--hash-size", "20000", "--density", "0.01"]
LARGE += ["--modes", "dct", "--bottom", "64", "--top", "64", "--checkpoint-every", "1", "--resume"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["--max-restarts", "1000"]


def _start(folder, launcher, *given):
    environment = {key: v for key, v in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, *launcher, ROOT / "examples" / "train_dlrm.py", *LARGE, *given]
    options = {"env": environment, "start_new_session": True}
    with open(folder.with_suffix(".log"), "a") as log:
        return subprocess.Popen([*command, "--out", folder], stdout=log, stderr=log, **options)


def _children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:
        return []


def _ranks(pid, launcher):
    """Processes of the ranks: torchrun's children, or those of the process they are forked from."""
    if launcher:
        return _children(pid)
    return [rank for child in _children(pid) for rank in _children(child)]


def _number(folder):
    manifest = folder / MANIFEST
    return json.loads(manifest.read_text())["number"] if manifest.exists() else 0


def _within_a_write(folder, since):
    """Whether files are there of a checkpoint that is not complete, younger than `since`."""
    begun = (folder / MANIFEST).parent.glob(f"{_number(folder) + 1}-rank*")
    return any(path.stat().st_mtime > since for path in begun)


@pytest.mark.large
@pytest.mark.parametrize(
    "launcher, given",
    [
        pytest.param(TORCHRUN, [], id="torchrun-data"),
        pytest.param([], [*HYBRID, "--embedding-dim", "64"], id="local-hybrid"),
    ],
)
def test_ten_kills_at_random_times(launcher, given, tmp_path):
    """SIGKILL for a rank, for all ranks, or for all processes; two and more within a write."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    started = time.time()
    process = _start(whole, launcher, *given)
    while _number(whole) == 0:
        assert process.poll() is None, whole.with_suffix(".log").read_text()
        time.sleep(0.05)
    to_first = time.time() - started
    assert process.wait() == 0, whole.with_suffix(".log").read_text()

    steps = json.loads((whole / "summary.json").read_text())["data"]["steps_per_epoch"]
    chance = random.Random(0)
    kills, within, process, numbers = 0, 0, None, []
    while kills < 10 or within < 2:
        assert kills < 50, "no write was met"
        process = process or _start(parts, launcher, *given)
        started = time.time()
        time.sleep(chance.uniform(0, 2 * to_first))
        if process.poll() is not None:  # it came to its end, and another begins
            assert process.returncode == 0, parts.with_suffix(".log").read_text()
            _assert_same_end(whole, parts, ["dct"], steps)
            process, parts = None, parts.with_name(f"{parts.name}-")
            continue
        ranks = _ranks(process.pid, launcher)
        if len(ranks) < 2:  # not started yet
            continue
        whom = chance.choice(["one", "all"] if launcher else ["one", "all", "everything"])
        if whom == "everything":
            os.killpg(process.pid, signal.SIGKILL)
        for rank in ranks if whom == "all" else [chance.choice(ranks)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        if not launcher:  # torchrun starts ranks again by itself
            assert process.wait() != 0
            process = None
        kills += 1
        within += _within_a_write(parts, started)
        numbers.append(_number(parts))
        print(f"{kills} kills, {within} of them within a write; checkpoints then: {numbers}")
    process = process or _start(parts, launcher, *given)
    assert process.wait() == 0, parts.with_suffix(".log").read_text()
    _assert_same_end(whole, parts, ["dct"], steps)
