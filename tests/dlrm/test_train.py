"""train_dlrm.py as a user starts it: modes, results, bytes by formula."""

import json
import re
import subprocess
import sys
from itertools import pairwise

import pytest

from criteo_lines import write_rows
from dlrm.comparison import main
from dlrm.data.features import table_rows
from support.programs import ROOT, TORCHRUN, called, run_as_torchrun

RANKS, BATCH, DIM, DENSITY = 2, 64, 8, 0.02
SMALL = ["--rows", 1500, "--batch-size", BATCH, "--hash-size", 50, "--embedding-dim", DIM]
TRAIN = [sys.executable, ROOT / "examples/train_dlrm.py"]


def _call_on_ranks(*arguments):
    """Return the output of rank 0. Two ranks are started as by torchrun; rank 1 prints nothing."""
    (status, out, err), second = run_as_torchrun(called, RANKS, main, *arguments)
    assert (status, second) == (0, (0, "", "")), err
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two seeds of every mode: (output, folder, summary)."""
    folder = tmp_path_factory.mktemp("runs") / "new" / "folder"
    modes = ("--modes", "dense,bf16,powersgd,dct", "--density", DENSITY, "--seeds", 2)
    output = _call_on_ranks(*SMALL, *modes, "--ranks", 5, "--out", folder)
    return output, folder, json.loads((folder / "summary.json").read_text())


def _linears():
    """(in, out) of each linear layer of the MLPs. Each layer also has a bias."""
    return [*pairwise([13, 512, 256, 64, DIM]), *pairwise([DIM + 27 * 26 // 2, 512, 256, 1])]


def test_bytes_match_formulas(results):
    """Each of 2 ranks sends the bytes of a whole tensor, in ring all-reduces and in all-gathers."""
    _, _, summary = results
    weights = [(rows, DIM) for rows in table_rows(50)] + _linears()
    biases = sum(out for _, out in _linears())
    numel = sum(n * m for n, m in weights) + biases
    # PowerSGD compresses a matrix if its two factors are less than half as large.
    powersgd = sum(n + m if 2 * (n + m) < n * m else n * m for n, m in weights) + biases
    # DCT sends a header, starts of blocks, and 4 bytes for each of 1.25 x density x numel entries.
    capacity, blocks = -(-int(numel * DENSITY * 125) // 100), -(-numel // 16384)
    dct = sum(-(-n // 16) * 16 for n in (64 + 4 * (blocks + 1), 2 * capacity, 2 * capacity))
    expected = {"dense": 4 * numel, "bf16": 2 * numel, "powersgd": 4 * powersgd, "dct": dct}
    for mode, runs in summary["modes"].items():
        assert {run["bytes_per_step_per_rank"] for run in runs} == {expected[mode]}, mode
        assert {run["bytes_by_purpose"]["gradients"] for run in runs} == {expected[mode]}, mode


def test_output_without_a_terminal(results):
    """The output has a line per run, a table and a conclusion, and no control characters."""
    output, _, summary = results
    assert list(summary["modes"]) == ["dense", "bf16", "powersgd", "dct"]
    for mode, runs in summary["modes"].items():
        assert len({run["weights_sha256"] for run in runs}) == len(runs) == 2
        for run in runs:
            assert output.count(f"{mode} seed {run['seed']}: AUC {run['auc']:.4f}") == 1
            lines = re.findall(rf"^{mode} seed {run['seed']}: (\d+) %, \d+ s left$", output, re.M)
            steps = summary["data"]["steps"]
            quarters = [-(-steps * quarter // 4) for quarter in (1, 2, 3)]
            assert [int(percent) for percent in lines] == [round(100 * s / steps) for s in quarters]
            assert 0.3 < run["auc"] < 1 and 0.3 < run["log_loss"] < 1 and run["step_ms_median"] > 0
            assert mode != "dct" or 0.3 * DENSITY < run["density"] <= 1.26 * DENSITY
    assert "Bayes" in output and "±" in output and "\x1b" not in output
    dense, dct = (summary["modes"][m][0]["bytes_per_step_per_rank"] for m in ("dense", "dct"))
    assert f"DCT sent {dense / dct:.1f} times fewer bytes than float32." in output
    assert re.search(r"^Total time: \d+ min \d+ s$", output, re.M)


def test_hybrid_on_a_file_and_its_bytes(tmp_path):
    """Each rank owns 13 of 26 tables and sends 2 of 8 entries per row, with a bitmap of 8 bits."""
    path = write_rows(tmp_path / "rows.tsv.gz", 1, 1500, before=["a header"])
    given = ["--data", path, "--parallel", "hybrid", "--row-density", 0.25, *SMALL[2:]]
    output = _call_on_ranks(*given, "--out", tmp_path)
    assert "skipped: 1 of 1,501 lines malformed (line 1: must have 40 fields, got 1)" in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "bayes" not in summary and summary["data"]["malformed"] == 1
    rows, counts = 13 * BATCH, 32
    mlps = sum(out * (inputs + 1) for inputs, out in _linears())
    (dense,), (dct,) = (
        [run["bytes_by_purpose"] for run in summary["modes"][mode]] for mode in ("dense", "dct")
    )
    ids = {"ids": counts + 4 * rows}
    assert dense == ids | {"rows": 32 * rows, "rows back": 32 * rows, "gradients": 4 * mlps}
    assert dct == ids | {"rows": 5 * rows, "rows back": 4 * rows, "gradients": dct["gradients"]}
    assert dct["gradients"] < 0.01 * dense["gradients"]


@pytest.mark.large
@pytest.mark.parametrize("launcher", [[], [*TORCHRUN[1:], "--nproc-per-node", "2"]])
def test_as_written(tmp_path, launcher):
    """Runs the program in new processes, which must import everything that they need."""
    command = [TRAIN[0], *launcher, TRAIN[1], *SMALL, "--out", tmp_path]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dct seed 0") == 1
