"""A command that was killed goes on to the same bits; what it cannot go on from is named."""

import json
import multiprocessing
import os
import signal
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dct_dlrm import arguments, files
from dct_dlrm.checkpoint import MANIFEST, Checkpoints
from dct_dlrm.errors import UsageError
from dct_dlrm.experiment import compare
from dct_dlrm.launch import _local_rank
from dct_dlrm.train import main

SMALL = ["--rows", "1500", "--batch-size", "64", "--hash-size", "50", "--embedding-dim", "8"]
SMALL += ["--bottom", "16", "--top", "64", "--epochs", "2", "--density", "0.05"]  # 18 steps
DATA = ["--modes", "dense,bf16,powersgd,dct"]
HYBRID = ["--parallel", "hybrid", "--modes", "dct", "--mp-format", "int4,sign", "--dedup"]
NOT_BITS = ("step_ms", "density", "density_mean")  # times, and what is noted of recent steps

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["dct_dlrm.experiment", "torch._dynamo"])


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
    """`compare`, on `rank` up to a step of the optimizer, or to within the write of a file."""
    if dist.get_rank() == rank and where == "step":
        torch.optim.SGD.step = _dies(torch.optim.SGD.step, lambda self: True, times)
    elif dist.get_rank() == rank:
        files.write = _dies(files.write, lambda path, content: path.name == where, times)
    compare(options)


def _ranks(folder, work, *args):
    """Exit codes of two ranks; the second is killed where one fails, as by torchrun."""
    number = len(list(folder.glob("rendezvous*")))
    rendezvous = f"file://{folder}/rendezvous{number}"
    (folder / f"rendezvous{number}.used").touch()
    ranks = [
        _context.Process(target=_local_rank, args=(rank, 2, rendezvous, work, args))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    while any(process.exitcode is None for process in ranks):
        wait([process.sentinel for process in ranks if process.exitcode is None], timeout=120)
        if any(process.exitcode for process in ranks):
            for process in ranks:
                process.kill()
                process.join()
    return [process.exitcode for process in ranks]


def _options(folder, *arguments_):
    (folder / "out").mkdir(exist_ok=True)
    out = ["--checkpoint-every", "4", "--resume", "--out", str(folder / "out")]
    return arguments.parse([*SMALL, *arguments_, *out])


def _finished(folder):
    """Each rank's finished runs, [(mode, run)]; what must not differ between two commands."""
    path = folder / "out" / MANIFEST
    runs = []
    for record in json.loads(path.read_text())["files"]:
        saved = torch.load(path.with_name(record["name"]), weights_only=True)
        assert saved["training"] is None
        for mode, run in saved["finished"]:
            bits = {key: value for key, value in run.items() if key not in NOT_BITS}
            runs.append((mode, bits))
    return runs


def _assert_same(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            _assert_same(left[key], right[key])
    else:
        assert left == right


KILLS = {
    # Within a rank's write, after the other's; within the manifest's, when both ranks are done.
    "data": (DATA, [(1, "12-rank1.pt", 1, 11), (0, "manifest.json", 7, 17)]),
    "hybrid": (HYBRID, [(0, "step", 14, 3)]),
}


@pytest.mark.parametrize("parallel", KILLS)
def test_killed_and_resumed_is_the_undisturbed_run(parallel, tmp_path):
    arguments_, kills = KILLS[parallel]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    assert _ranks(whole, compare, _options(whole, *arguments_)) == [0, 0]
    for rank, where, times, left in kills:
        codes = _ranks(parts, _killed, _options(parts, *arguments_), rank, where, times)
        assert codes[rank] == -signal.SIGKILL
        # What is there is the last complete one, whatever lies beside it.
        assert json.loads((parts / "out" / MANIFEST).read_text())["number"] == left
    assert _ranks(parts, compare, _options(parts, *arguments_)) == [0, 0]
    expected, got = _finished(whole), _finished(parts)
    assert [mode for mode, _ in got] == 2 * arguments.parse(arguments_).modes
    for (mode, run), (_, other) in zip(expected, got, strict=True):
        assert len(run["loss"]) == 18, mode
        _assert_same(run, other)
    leftover = {path.name.partition("-")[0] for path in (parts / "out/checkpoint").glob("*.pt*")}
    assert leftover == {str(5 * len({mode for mode, _ in got}))}


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


SETTINGS = {"--density": 0.01, "--modes": ["dense", "dct"], "train_rows": 5}


def _checkpoints(folder, **different):
    named = {f"--{name}": value for name, value in different.items()}
    return Checkpoints(folder, SETTINGS | named)


@pytest.fixture
def saved(tmp_path, one_rank):
    checkpoints = _checkpoints(tmp_path)
    assert checkpoints.load() is None
    checkpoints.save({"step": 3})
    checkpoints.save({"step": 4, "w": torch.arange(1000.0)})
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["2-rank0.pt", "lock", "manifest.json"]
    return tmp_path


def test_the_last_is_loaded(saved):
    checkpoints = _checkpoints(saved)
    state = checkpoints.load()
    assert state["step"] == 4 and torch.equal(state["w"], torch.arange(1000.0))
    checkpoints.save({"step": 5})
    del checkpoints  # as its process ends
    assert _checkpoints(saved).load() == {"step": 5}


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _replace(path):
    torch.save({"step": 4}, path)


@pytest.mark.parametrize("damage", [_cut, _change_a_byte, _replace, Path.unlink])
@pytest.mark.parametrize("name", ["2-rank0.pt", "manifest.json"])
def test_a_damaged_file_is_refused_by_name(saved, damage, name):
    path = saved / "checkpoint" / name
    damage(path)
    checkpoints = _checkpoints(saved)
    if damage is Path.unlink and name == "manifest.json":
        assert checkpoints.load() is None  # there is no checkpoint
        return
    with pytest.raises(UsageError, match=f"{path}"):
        checkpoints.load()


def test_what_could_run_code_is_refused(saved):
    """Even where the manifest was made for it."""

    class Harmful:
        def __reduce__(self):
            return print, ("harm",)

    checkpoints = _checkpoints(saved)
    checkpoints.load()
    checkpoints.save(Harmful())
    del checkpoints
    with pytest.raises(UsageError, match=r"3-rank0\.pt must be loadable with weights_only=True"):
        _checkpoints(saved).load()


def test_other_settings_are_refused_by_name(saved):
    with pytest.raises(UsageError) as caught:
        _checkpoints(saved, density=0.02, modes=["dense"], lr=1.0).load()
    where = f"as in {saved / MANIFEST}"
    assert str(caught.value) == (
        f"--density must be 0.01 {where}, got 0.02; --modes must be ['dense', 'dct'] {where}, got "
        f"['dense']; --lr must be None {where}, got 1.0"
    )


def test_another_version_is_refused(saved):
    manifest = json.loads((saved / MANIFEST).read_text()) | {"version": 2}
    (saved / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="must be of version 1, got 2"):
        _checkpoints(saved).load()


def test_one_command_at_a_time(tmp_path, one_rank):
    first = _checkpoints(tmp_path)
    with pytest.raises(UsageError, match=f"got {tmp_path}, where another is at work"):
        _checkpoints(tmp_path)
    del first
    _checkpoints(tmp_path)


def test_the_command(tmp_path, capfd):
    """Fresh where there is nothing, done where all is; nothing is overwritten unasked."""
    out = [*SMALL, "--ranks", "1", "--modes", "dct", "--out", str(tmp_path)]
    every = ["--checkpoint-every", "5", "--resume"]
    assert main([*out, *every]) == 0
    summary = (tmp_path / "summary.json").read_bytes()
    assert "goes on" not in capfd.readouterr().out
    assert main(out) == 1
    rule = "--out must be without a checkpoint, got .*, which has one: --resume goes on from it"
    assert capfd.readouterr().err.count(rule.partition(" got")[0])
    assert main([*out, *every, "--lr", "0.2"]) == 1
    assert "--lr must be 0.1 as in " in capfd.readouterr().err
    assert main([*out, *every]) == 0
    assert "goes on after 1 finished runs and 0 steps of the next" in capfd.readouterr().out
    assert (tmp_path / "summary.json").read_bytes() == summary


@pytest.mark.parametrize(
    "arguments_, text",
    [
        (["--resume"], "--resume must come with --out, got none"),
        (["--resume", "--overwrite", "--out", "x"], "--resume must come without --overwrite"),
        (["--checkpoint-every", "0"], "must be an integer >= 1, got '0'"),
    ],
)
def test_a_wrong_argument(capsys, arguments_, text):
    with pytest.raises(SystemExit):
        arguments.parse(arguments_)
    assert text in capsys.readouterr().err
