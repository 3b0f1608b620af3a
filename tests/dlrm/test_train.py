"""train_dlrm.py as a user starts it: modes, results, bytes by formula, errors."""

import io
import json
import math
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch.distributed as dist
from rich.console import Console

from criteo_lines import write_rows
from dlrm import report
from dlrm.arguments import parse
from dlrm.comparison import main
from dlrm.conclusion import conclusion
from dlrm.data.features import table_rows
from dlrm.loop import Run
from dlrm.progress import bar
from dlrm.scores import Scores
from dlrm.training import Record
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


def test_the_summary_and_the_plot(results):
    _, folder, summary = results
    assert set(summary) == {"config", "data", "modes", "bayes"}
    assert summary["config"]["ranks"] == RANKS and summary["config"]["density"] == DENSITY
    assert summary["data"]["train_rows"] + summary["data"]["test_rows"] == 1500
    assert list(summary["modes"]) == ["dense", "bf16", "powersgd", "dct"]
    for mode, runs in summary["modes"].items():
        assert [run["seed"] for run in runs] == [0, 1]
        assert len({run["weights_sha256"] for run in runs}) == 2
        for run in runs:
            assert 0.3 < run["auc"] < 1 and 0.3 < run["log_loss"] < 1 and run["step_ms_median"] > 0
            if mode == "dct":
                assert 0.3 * DENSITY < run["density"] <= 1.26 * DENSITY
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


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
    for mode, runs in summary["modes"].items():
        for run in runs:
            assert output.count(f"{mode} seed {run['seed']}: AUC {run['auc']:.4f}") == 1
    assert "Bayes" in output and "±" in output and "\x1b" not in output
    dense, dct = (summary["modes"][m][0]["bytes_per_step_per_rank"] for m in ("dense", "dct"))
    assert f"{dense / dct:.1f}x" in output and "ms/step" not in output
    assert "generated rows (no real data): 1," in output and "9 steps: too short to" in output
    assert f"DCT sent {dense / dct:.0f} times fewer bytes than float32." in output
    assert "standard deviation over 2 seeds" in output and "--optimizer adamw --format" in output


def _runs(losses, steps, sent, step_ms):
    """Make one run per log loss."""
    record = Record(*(np.full(steps, value) for value in (0.5, step_ms)), {"gradients": sent})
    return [Run(n, Scores(0.7, loss, 1.0), record, None, "") for n, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "steps", "begins"),
    [
        ([0.5001, 0.5021], 400, "Same quality within the spread over seeds (log loss +0.0001, sp"),
        ([0.5031, 0.5051], 400, "The difference exceeds the spread over seeds (log loss +0.0031,"),
        ([0.4980], 400, "One seed: log loss -0.0020 compared with float32, with 100 times"),
        ([0.5001, 0.5021], 40, "DCT sent 100 times fewer bytes than float32. Over a 1 Gbit/s"),
    ],
)
def test_the_conclusion(one_rank, monkeypatch, losses, steps, begins):
    """There are 2**20 parameters. DCT sends 1 % of the bytes of float32. Compute takes 20 ms."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    numel, options = 2**20, parse(["--density", "0.01"])
    dct_bytes = 4 * numel / 100
    baseline = [0.5000, 0.5020][: len(losses)]
    runs = {
        "dense": _runs(baseline, steps, np.full(steps, 4.0 * numel), 40.0),
        "dct": _runs(losses, steps, np.full(steps, dct_bytes), 22.0),
    }
    text = conclusion(runs, options)
    assert text.startswith(begins)
    ours, float32, bfloat16, compute = map(int, re.findall(r"(\d+) ms", text))
    # A message takes 1.5 ms, and a byte 8 ns on the link and 0.5 ns in the ranks.
    wires = [2 * (1.5 + 1e3 * nbytes * numel / 2 * 8.5e-9) for nbytes in (4, 2)]
    assert [float32, bfloat16] == pytest.approx([compute + wire for wire in wires], abs=3)
    assert 17 <= compute <= 21 and compute < ours < compute + 6
    assert conclusion({"dct": runs["dct"]}, options) == ""


def test_the_plot():
    sent = np.full(400, 1e6)
    axes = report.plot({"dense": _runs([0.5, 0.6], 400, sent, 1.0)}).axes[0]
    assert axes.get_title() == "DLRM, 400 steps: training loss against bytes sent"
    assert "bytes" in axes.get_xlabel() and "mean over 41 steps" in axes.get_ylabel()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["dense (2 seeds)"]
    x, y = axes.lines[0].get_data()
    assert x[-1] == 400e6 and y == pytest.approx(0.5)


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


def test_columns_and_their_bytes(tmp_path):
    """A rank sends the inputs of its samples and its half of the first layer's features. It sends
    its half of the second layer's features for the samples of the other rank."""
    given = ["--parallel", "columns", "--row-density", 0.25, *SMALL]
    _call_on_ranks(*given, "--out", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    (dense,), (dct,) = (
        [run["bytes_by_purpose"] for run in summary["modes"][mode]] for mode in ("dense", "dct")
    )
    (inputs, first), (_, second), _ = _linears()[-3:]
    sent = [(inputs, BATCH), (first // 2, 2 * BATCH), (second // 2, BATCH)]
    assert dense["rows"] == dense["rows back"] == sum(4 * width * rows for width, rows in sent)
    assert dct["rows back"] == sum(2 * math.ceil(width / 4) * rows for width, rows in sent)
    whole = sum(out * (inputs + 1) for inputs, out in [*_linears()[:-3], (second, 1)])
    assert dense["gradients"] == 4 * (whole + DIM * sum(table_rows(50)))


REFUSED = [
    (["--density", "2"], "argument --density: must be a number in (0, 1], got '2'"),
    (["--seeds", "0"], "argument --seeds: must be an integer >= 1, got '0'"),
    (["--lr", "nan"], "argument --lr: must be a number > 0, got 'nan'"),
    (["--hash-size", "1"], "argument --hash-size: must be an integer in [2, 2^31), got '1'"),
    (["--modes", "dtc"], "argument --modes: must be 1 to 4 of dense, bf16, powersgd, dct, joined"),
    (["--row-format", "int4,int3"], "argument --row-format: must be 1 to 2 of float32, bfloat16"),
    (
        ["--row-format", "int4"],
        "--row-format must come with --parallel hybrid or columns, got data",
    ),
    (["--dedup"], "--dedup must come with --parallel hybrid, got data"),
    (["--density", "0.1", "--format", "int4"], "--density must come with --format float32 or bf"),
    (["--row-format", "int4", "--row-density", "1"], "--row-density: not allowed with argument"),
    (["--epoch", "2"], "unrecognized arguments: --epoch 2"),
    (
        ["--data", "none.tsv"],
        "train_dlrm.py: none.tsv must be a file, got a path that does not ex",
    ),
    (["--out", "taken"], "--out must not contain summary.json, got taken: use --overwrite to"),
    (["--out", "taken/summary.json"], "--out must be a writable folder, got taken/summary.json"),
]


@pytest.mark.parametrize(("given", "text"), REFUSED, ids=lambda part: " ".join(part)[:40])
def test_errors_name_option_rule_and_value(tmp_path, monkeypatch, capsys, given, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/summary.json").touch()
    try:
        assert main(given) == 1
    except SystemExit as end:
        assert end.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.large
@pytest.mark.parametrize("launcher", [[], [*TORCHRUN[1:], "--nproc-per-node", "2"]])
def test_as_written(tmp_path, launcher):
    """Runs the program in new processes, which must import everything that they need."""
    command = [TRAIN[0], *launcher, TRAIN[1], *SMALL, "--out", tmp_path]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dct seed 0") == 1


def test_the_progress_bar_shows_the_smoothed_loss():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with bar(console, "seed 0", 3) as on_step:
        assert "loss" not in console.file.getvalue()
        on_step(0.5)
        on_step(1.5)
    assert "seed 0" in console.file.getvalue() and "loss 0.5200" in console.file.getvalue()
    with bar(Console(file=io.StringIO()), "seed 0", 1) as on_step:
        on_step(0.5)  # not a terminal: nothing is drawn
