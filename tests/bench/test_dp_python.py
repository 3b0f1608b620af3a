"""experiments.dp_python: the files and windows that are read, and the batches of each rank."""

import pytest
import torch

from bench.cli import UsageError
from bench.experiments import dp_python


def _files(count=400):
    return [dp_python.Source(f"torch/{i}.py", b"%03d" % i * 40) for i in range(count)]


def test_windows_do_not_overlap_and_parts_are_whole_files():
    sources = _files()
    texts = dp_python.windows(sources, 65)
    assert {*texts} == {"train", "validation", "test"}
    for part, found in texts.items():
        text = b"".join(source.text for source in sources if source.part() == part)
        decoded = bytes(dp_python.KNOWN[number] for number in found.flatten().tolist())
        assert decoded == text[: len(text) // 65 * 65] and found.shape[1] == 65
    assert len(texts["train"]) > 10 * len(texts["test"]) > 0
    assert dp_python.windows([dp_python.Source("x", b"\n ~")], 3)["train"].tolist() == [[0, 1, 95]]


def test_ranks_see_every_window_once(monkeypatch):
    monkeypatch.setattr(dp_python, "installed", _files)
    task = dp_python.PythonTask(width=8, layers=1, batch=3)
    batches = [[], []]
    for rank, own in enumerate(batches):
        with pytest.raises(UsageError, match=r"--steps must use at most the \d+ texts"):
            own.extend(task.batches(0, rank, 2))
    train = dp_python.windows(_files(), 65)["train"]
    seen = torch.cat([*batches[0], *batches[1]])
    assert len(seen) == len(train)
    assert sorted(seen.tolist()) == sorted(train.tolist())
    first = next(task.batches(1, 0, 2))
    assert not torch.equal(first, batches[0][0])
