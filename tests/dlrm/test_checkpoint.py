"""The checkpoint of a command: what it cannot go on from is refused by name."""

import json
import os
from pathlib import Path

import pytest
import torch
from full_disk import full_disk

from dlrm.checkpoint import MANIFEST, Checkpoints
from dlrm.errors import UsageError
from dlrm.experiment import _going_on
from dlrm.train import main

SMALL = ["--rows", "1500", "--batch-size", "64", "--hash-size", "50", "--embedding-dim", "8"]
SMALL += ["--bottom", "16", "--top", "64", "--epochs", "2", "--density", "0.05"]  # 18 steps


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


def test_on_a_full_disk_the_last_one_stays(saved):
    before = sorted(os.listdir(saved / "checkpoint"))
    checkpoints = _checkpoints(saved)
    assert checkpoints.load()["step"] == 4
    with full_disk(), pytest.raises(UsageError, match=r"3-rank0\.pt cannot be written"):
        checkpoints.save({"step": 5})
    assert sorted(os.listdir(saved / "checkpoint")) == before
    del checkpoints
    assert _checkpoints(saved).load()["step"] == 4


def _cut(path):
    path.write_bytes(path.read_bytes()[:-2])  # of a manifest more than the line's end


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
    with pytest.raises(UsageError, match=r"3-rank0\.pt must load with weights_only=True"):
        _checkpoints(saved).load()


def test_other_settings_are_refused_by_name(saved):
    with pytest.raises(UsageError) as caught:
        _checkpoints(saved, density=0.02, modes=["dense"], lr=1.0).load()
    where = f"as in {saved / MANIFEST}"
    assert str(caught.value) == (
        f"--density must be 0.01 {where}, got 0.02; --modes must be ['dense', 'dct'] {where}, got "
        f"['dense']; --lr must be None {where}, got 1.0"
    )


@pytest.mark.parametrize(
    "content",
    [
        '{"version": 2, "settings": {}}',
        '{"version": 2, "settings": [], "number": 2, "files": []}',
        '{"version": 2, "settings": {}, "number": "2", "files": []}',
    ],
    ids=["lacks", "settings", "number"],
)
def test_a_manifest_that_was_not_written_so_is_refused(saved, content):
    (saved / MANIFEST).write_text(content)
    with pytest.raises(UsageError, match=f"{saved / MANIFEST} must be as it was written"):
        _checkpoints(saved).load()


def test_another_version_is_refused(saved):
    manifest = json.loads((saved / MANIFEST).read_text()) | {"version": 1}
    (saved / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="must be of version 2, got 1"):
        _checkpoints(saved).load()


def test_one_command_at_a_time(tmp_path, one_rank):
    first = _checkpoints(tmp_path)
    with pytest.raises(UsageError, match=f"got {tmp_path}, where another is at work"):
        _checkpoints(tmp_path)
    del first
    _checkpoints(tmp_path)


def test_the_command(tmp_path, capsys):
    """Fresh where there is nothing, done where all is; nothing is overwritten unasked."""
    out = [*SMALL, "--ranks", "1", "--modes", "dct", "--out", str(tmp_path)]
    every = ["--checkpoint-every", "5", "--resume"]
    assert main([*out, *every]) == 0
    summary = (tmp_path / "summary.json").read_bytes()
    assert main(out) == 1
    rule = f"--out must be without a checkpoint, got {tmp_path}, which has one: --resume goes on"
    assert rule in capsys.readouterr().err
    assert main([*out, *every, "--lr", "0.2"]) == 1
    assert "--lr must be 0.1 as in " in capsys.readouterr().err
    assert main([*out, *every]) == 0
    assert (tmp_path / "summary.json").read_bytes() == summary  # its times, too: nothing was run


def test_what_a_command_goes_on_from_is_told():
    saved = {"finished": [("dense", {})], "training": {"noted": {"losses": [0.5] * 1500}}}
    assert _going_on(saved) == "goes on after 1 finished runs and 1,500 steps of the next"
