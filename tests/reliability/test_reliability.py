"""Runs a thousandth of the cases of each part, for the entry points in the part's QUICK.

With -m large, runs a hundredth of the cases, for all entry points.
"""

import json
import types

import pytest

from reliability import PARTS, __main__, part


def _cases():
    """Yield (part, entry point, number of cases): a thousandth, or a hundredth if marked large."""
    for name in PARTS:
        module = part(name)
        for point, asked in module.COUNTS.items():
            if point in getattr(module, "QUICK", module.COUNTS):
                yield pytest.param(name, point, max(asked // 1000, 1), id=f"{name}-{point}")
            many = max(asked // 100, 1)
            yield pytest.param(
                name, point, many, id=f"{name}-{point}-{many}", marks=pytest.mark.large
            )


@pytest.mark.parametrize(("name", "point", "count"), list(_cases()))
def test_no_case_fails(name, point, count):
    assert part(name).run(point, 0, count, seed=0)["failures"] == []


def test_failures_are_kept_and_a_run_resumes(tmp_path, monkeypatch, capsys):
    calls = []

    def cases(point, first, count, seed):
        calls.append((point, first, count, seed))
        failures = [{"case": 3, "what": "3 is bad"}] if first <= 3 < first + count else []
        return {"failures": failures, "steps": 2 * count, "max_kb": first}

    module = types.SimpleNamespace(COUNTS={"a": 5, "b": 2}, BATCH=2, run=cases)
    monkeypatch.setattr(__main__, "part", lambda name: module)

    def run(*arguments):
        out = ["--out", str(tmp_path / "day" / "numbers.json")]
        return __main__.run(__main__.parse(["fuzz", "--seed", "7", *out, *arguments]))

    assert run("--entry-point", "a", "--count", "3") == 0
    assert run() == 1
    assert calls == [("a", 0, 2, 7), ("a", 2, 1, 7), ("a", 3, 2, 7), ("b", 0, 2, 7)]
    assert "a: 5 run, 1 failed\n  case 3: 3 is bad\n" in capsys.readouterr().out
    content = json.loads((tmp_path / "day" / "numbers.json").read_text())
    failures = [{"case": 3, "what": "3 is bad"}]
    assert content["results"]["a"] == {"done": 5, "failures": failures, "steps": 10, "max_kb": 3}
    assert run("--count", "5", "--minutes", "0") == 1
    assert len(calls) == 4
    with pytest.raises(SystemExit, match="--entry-point must be one of a, b, got c"):
        run("--entry-point", "c")
    with pytest.raises(SystemExit, match="has seed 7, not 8"):
        run("--seed", "8")
