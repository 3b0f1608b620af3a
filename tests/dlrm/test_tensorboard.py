"""train_dlrm.py --tensorboard: the event files, across a restart too; and without the package."""

import sys

import pytest

from dlrm import tensorboard
from dlrm.progress import Step
from dlrm.train import main

SMALL = ["--rows", "3000", "--batch-size", "32", "--hash-size", "50", "--embedding-dim", "8"]
SMALL += ["--bottom", "16", "--top", "64", "--density", "0.05", "--ranks", "1"]


def _read(folder):
    """{tag: {step: value}}."""
    reason = "pip install tensorboard: an extra, for one option"
    module = "tensorboard.backend.event_processing.event_accumulator"
    events = pytest.importorskip(module, reason=reason).EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def test_curves_of_a_command(tmp_path):
    pytest.importorskip("tensorboard", reason="an extra, for one option")
    modes = ["--modes", "dense,dct", "--epochs", "2"]
    assert main([*SMALL, *modes, "--tensorboard", "--out", str(tmp_path)]) == 0
    runs = {mode: _read(tmp_path / "tensorboard" / f"{mode}-seed0") for mode in ("dense", "dct")}
    steps = list(range(10, 141, 10))
    scores = {"AUC", "log loss"}
    assert set(runs["dense"]) == scores | {"loss", "bytes"}
    scalars = {tag for tag in runs["dct"] if "/" not in tag}
    assert scalars == scores | {"loss", "bytes", "density", "overflow"}
    (norm,) = runs["dct"]["residual_norm/top.0.weight"].items()
    assert norm[0] == 100 and norm[1] > 0
    figures = {tag.partition("/")[0] for tag in runs["dct"] if "/" in tag}
    assert figures == {"density", "threshold", "residual_norm"}
    for run in runs.values():
        assert list(run["loss"]) == list(run["bytes"]) == steps
        assert list(run["AUC"]) == list(run["log loss"]) == [148]
        assert 0.3 < run["AUC"][148] < 1 and all(0.3 < loss < 1 for loss in run["loss"].values())
    assert all(0.01 < density < 0.0625 for density in runs["dct"]["density"].values())


def _steps(first, last, loss):
    return [Step(number, loss, 100, None) for number in range(first, last + 1)]


def test_points_after_the_checkpoint_are_drawn_once(tmp_path):
    """Of a rank that was killed at step 40 and went on from a checkpoint after step 25."""
    pytest.importorskip("tensorboard", reason="an extra, for one option")
    for done, last, loss in ((0, 40, 0.5), (25, 60, 0.25)):
        with tensorboard.curves(tmp_path, done) as on_step:
            for step in _steps(done + 1, last, loss):
                on_step(step)
    expected = {10: 0.5, 20: 0.5, 30: 0.25, 40: 0.25, 50: 0.25, 60: 0.25}
    assert _read(tmp_path)["loss"] == expected


def test_without_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    assert main([*SMALL, "--tensorboard", "--out", str(tmp_path / "new")]) == 1
    said = capsys.readouterr().err
    assert said == "train_dlrm.py: tensorboard is not installed: pip install tensorboard\n"
    assert not (tmp_path / "new").exists()
