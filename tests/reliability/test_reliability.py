"""A thousandth of the parts' quick doors; a hundredth with -m large. And what runs them."""

import json
import types

import pytest

from dlrm.errors import UsageError
from pages import experiments
from reliability import PARTS, campaign, part
from reliability.__main__ import parse, run


def _cases():
    """(part, door, so many cases) for a thousandth and, large, for a hundredth."""
    for name in PARTS:
        module = part(name)
        for door, asked in module.COUNTS.items():
            if door in getattr(module, "QUICK", module.COUNTS):
                yield pytest.param(name, door, max(asked // 1000, 1), id=f"{name}-{door}")
            many = max(asked // 100, 1)
            yield pytest.param(
                name, door, many, id=f"{name}-{door}-{many}", marks=pytest.mark.large
            )


@pytest.mark.parametrize(("name", "door", "count"), list(_cases()))
def test_no_case_fails(name, door, count):
    assert part(name).run(door, 0, count, seed=0)["failures"] == []


def _part(fails=()):
    """Cases that say in which order they were run."""
    calls = []

    def cases(door, first, count, seed):
        calls.append((door, first, count, seed))
        failures = [{"case": n, "what": f"{n} is bad"} for n in fails if first <= n < first + count]
        return {"failures": failures, "steps": 2 * count, "max_kb": first}

    doc = "Numbers.\n\nNone of these\nis bad.\n\nMore."
    module = types.ModuleType("reliability.numbers", doc)
    module.COUNTS, module.BATCH, module.run = {"a": 5, "b": 2}, 2, cases
    return module, calls


def test_every_batch_is_kept_and_a_run_goes_on_where_it_was(tmp_path):
    module, calls = _part()
    path = tmp_path / "day" / "reliability_numbers.json"
    content = campaign.read(path, module, 7)
    for n, _ in enumerate(campaign.batches(module, content, module.COUNTS, 90)):
        campaign.write(path, content)
        if n == 1:
            break
    assert calls == [("a", 0, 2, 7), ("a", 2, 2, 7)]
    content = campaign.read(path, module, 7)
    assert [content["runs"][0][key] for key in ("done", "steps", "max_kb")] == [4, 8, 2]
    for _ in campaign.batches(module, content, module.COUNTS, 90):
        campaign.write(path, content)
    assert calls[2:] == [("a", 4, 1, 7), ("b", 0, 2, 7)]
    (kept,) = experiments.load(tmp_path).values()
    assert (kept.title, kept.question) == ("Numbers", "None of these is bad.")
    assert kept.answer == "7 cases of 7 were run, none failed."
    assert [run["done"] for run in kept.runs] == [5, 2]
    assert list(campaign.batches(module, content, {"a": 5}, 90)) == []
    assert list(campaign.batches(module, content, {"a": 9}, 0)) == []  # no minute left
    with pytest.raises(UsageError, match=r"must be of settings \{'seed': 8\}, .* has \{'seed': 7"):
        campaign.read(path, module, 8)


def test_a_case_that_fails_is_kept_and_said(tmp_path, monkeypatch, capsys):
    module, _ = _part(fails=[1, 3])
    monkeypatch.setattr("reliability.__main__.PARTS", ["numbers"])
    monkeypatch.setattr("reliability.__main__.part", lambda name: module)
    out = ["--out", str(tmp_path / "numbers.json")]
    assert run(parse(["numbers", "--door", "a", "--count", "4", *out])) == 1
    said = capsys.readouterr().out
    assert "a: 4 of 4, 2 failed\n  case 1: 1 is bad\n  case 3: 3 is bad\n" in said
    (door,) = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    assert door["failures"] == [{"case": 1, "what": "1 is bad"}, {"case": 3, "what": "3 is bad"}]
    with pytest.raises(UsageError, match="--door must be of a, b, got c"):
        run(parse(["numbers", "--door", "c", *out]))
