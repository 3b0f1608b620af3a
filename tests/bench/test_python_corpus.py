"""experiments.python_corpus: which files are read, what of them, and who is given what."""

import pytest
import torch

from bench.cli import UsageError
from bench.experiments import dp_python, python_corpus

CODE = b"def half(x):\n    return x / 2\n"


def test_sources_by_path_without_generated_ones(tmp_path):
    files = {
        "b.py": CODE,
        "a.py": CODE + "    # \N{GREEK SMALL LETTER PI}\tis\r\n".encode(),
        "version.py": CODE,
        "numbers.py": CODE + b"x = 1234567890\n" * 9,
        "long.py": CODE + b"x" * 300,
    }
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    assert python_corpus.read({"torch": tmp_path}) == [
        ("torch/a.py", CODE + b"    # is\n"),
        ("torch/b.py", CODE),
    ]


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(python_corpus, "read", lambda folders: [python_corpus.Source("a", CODE)])
    with pytest.raises(UsageError, match=r"torch 2.13.0, sympy 1.14.0 .* got those of torch \d"):
        python_corpus.installed()


def _files(count=400):
    return [python_corpus.Source(f"torch/{i}.py", b"%03d" % i * 40) for i in range(count)]


def test_windows_share_nothing_and_parts_are_whole_files():
    sources = _files()
    texts = python_corpus.windows(sources, 65)
    assert {*texts} == {"train", "validation", "test"}
    for part, found in texts.items():
        text = b"".join(source.text for source in sources if source.part() == part)
        back = bytes(python_corpus.KNOWN[number] for number in found.flatten().tolist())
        assert back == text[: len(text) // 65 * 65] and found.shape[1] == 65
    assert len(texts["train"]) > 10 * len(texts["test"]) > 0
    assert python_corpus.windows([python_corpus.Source("x", b"\n ~")], 3)["train"].tolist() == [
        [0, 1, 95]
    ]


def test_ranks_see_every_window_once(monkeypatch):
    monkeypatch.setattr(python_corpus, "installed", _files)
    task = dp_python.PythonTask(width=8, layers=1, batch=3)
    batches = [[], []]
    for rank, own in enumerate(batches):
        with pytest.raises(UsageError, match=r"--steps must end before a rank's \d+ texts"):
            own.extend(task.batches(0, rank, 2))
    train = python_corpus.windows(_files(), 65)["train"]
    seen = torch.cat([*batches[0], *batches[1]])
    assert len(seen) == len(train)
    assert sorted(seen.tolist()) == sorted(train.tolist())
    first = next(task.batches(1, 0, 2))
    assert not torch.equal(first, batches[0][0])
