"""experiments.paper: the commands of the page run, and its tables match the stored runs."""

import json
import re
import shlex
import sys

import pytest

from bench.experiments import paper
from support.programs import ROOT

PAGE = (ROOT / "docs/results/paper.md").read_text()
GUIDE = (ROOT / "docs/guide/paper.md").read_text()
COMMANDS = [
    shlex.split(command, comments=True)
    for command in re.findall(r"^python -m bench\.experiments\.paper(.*)$", GUIDE, re.M)
]
TINY = ["--rows", "1500", "--seeds", "1"]


def test_the_tables_of_the_page_match_the_runs():
    kept = json.loads((ROOT / "bench/results/2026-11-28-cpu/paper.json").read_text())
    for title, runs in kept["tables"].items():
        assert f"## {title}\n\n{paper.report(runs, runs[0]['cut'])}\n" in PAGE
    assert len(kept["tables"]) == len(re.findall(r"^\| setting ", PAGE, re.M)) > 0


def _run(setting, seed, log_loss, auc, gradients, rows=0):
    sent = {"gradients": gradients, "rows": rows}
    scores = {"seed": seed, "log_loss": log_loss, "auc": auc}
    return {"cut": "rows", "setting": setting, "bytes": sent, **scores}


def test_the_table_compares_seed_by_seed_and_counts_compressed_bytes():
    """Losses differ by 0.2 and 0.4, AUC by -0.1 and -0.3. Rows take 5 bytes instead of 100."""
    runs = [_run("float32", seed, 1 + seed, 0.8, 1000, 100) for seed in (0, 1)]
    runs += [_run("5 %", seed, 1.2 + 1.2 * seed, 0.7 - 0.2 * seed, 1001, 5) for seed in (0, 1)]
    runs += [_run("both", 0, 0.9, 0.8, 50, 5), {**_run("other", 0, 0, 0, 1), "cut": "columns"}]
    lines = [" ".join(line.split()) for line in paper.report(runs, "rows").splitlines()[2:]]
    assert lines == [
        "| float32 | 1,000 | 100 | 1.0x | 0.5x | 1.5000 | | | 0.8000 | | |",
        "| 5 % | 1,001 | 5 | 20.0x | 10.0x | 1.8000 | +0.3000 ± 0.1000 | +0.4000 "
        "| 0.6000 | -0.2000 ± 0.1000 | -0.3000 |",
        "| both | 50 | 5 | 20.0x | 10.0x | 0.9000 | -0.1000 | -0.1000 | 0.8000 | | |",
    ]


@pytest.mark.large
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_of_the_page_run(command, tmp_path, monkeypatch, capfd):
    given = [*command, *TINY, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["paper", *given])
    cuts = paper.parse(given).cuts
    assert set(cuts) <= set(paper.SETTINGS)
    paper.main()
    runs = json.loads((tmp_path / "runs.json").read_text())
    found = {(run["cut"], run["setting"]) for run in runs}
    names = paper.BASELINES.values()
    assert found == {(cut, name) for cut in cuts for name in (*names, *paper.SETTINGS[cut])}
    assert all(0 < run["auc"] < 1 and run["bytes"]["gradients"] > 0 for run in runs)
    printed = capfd.readouterr().out
    assert all(paper.report(runs, cut) in printed for cut in cuts)
    monkeypatch.setattr(paper.subprocess, "run", lambda *_: pytest.fail("trained again"))
    assert paper.train(paper.parse(given)) == runs
