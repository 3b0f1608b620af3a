"""train_dlrm.py end to end, as a user starts it: modes, results, bytes by formula, failures."""

import contextlib
import gzip
import io
import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from programs import ROOT, TORCHRUN, run_as_torchrun

from criteo_lines import line
from dct_kernels import payload_layout
from dlrm.data import synthetic
from dlrm.data.features import table_rows
from dlrm.train import main

SMALL = ["--hash-size", "50", "--embedding-dim", "4", "--bottom", "16", "--top", "64"]
DENSITY = 0.02
TRAIN = [str(ROOT / "examples" / "train_dlrm.py")]


def _start(*arguments, launcher=()):
    # As if in a terminal of their own: not under a torchrun that may have started the tests.
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, *launcher, *TRAIN, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def _start_torchrun(*arguments):
    return _start(*arguments, launcher=[*TORCHRUN[1:], "--nproc-per-node", "2"])


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def _call(*arguments):
    """The command in this process; what its ranks print on their own is not seen."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return Done(status, out.getvalue(), err.getvalue())


def _call_on_ranks(*arguments):
    """The command in two forked ranks, as under torchrun."""
    status, *printed = zip(*run_as_torchrun(_call, 2, *arguments), strict=True)
    return Done(max(status), *map("".join, printed))


# Processes of their own, which import all that they need, take several times as long.
def _in_short(short, command):
    return [pytest.param(short, id="forked"), pytest.param(command, marks=pytest.mark.large)]


@pytest.fixture(scope="module", params=_in_short(_call_on_ranks, _start))
def results(request, tmp_path_factory):
    """Two seeds of every mode on 2 ranks: (output, folder, summary)."""
    folder = tmp_path_factory.mktemp("runs") / "new" / "folder"
    done = request.param(
        *("--rows", 1500, "--batch-size", 64, "--modes", "dense,bf16,powersgd,dct"),
        *("--seeds", 2, "--density", DENSITY, "--out", folder, *SMALL),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder, json.loads((folder / "summary.json").read_text())


def test_summary(results):
    _, _, summary = results
    assert set(summary) == {"config", "data", "modes", "bayes"}
    assert summary["config"]["ranks"] == 2 and summary["config"]["density"] == DENSITY
    assert summary["data"]["train_rows"] + summary["data"]["test_rows"] == 1500
    assert set(summary["bayes"]) == {"auc", "log_loss", "calibration"}
    assert list(summary["modes"]) == ["dense", "bf16", "powersgd", "dct"]
    for runs in summary["modes"].values():
        assert [run["seed"] for run in runs] == [0, 1]
        for run in runs:
            assert set(run) == {
                *("seed", "auc", "log_loss", "calibration", "step_ms_median", "density_mean"),
                *("wire_bytes_per_step_per_rank", "wire_bytes_per_step_max_rank"),
                *("ranks_equal", "weights_sha256"),
            }
            assert 0.3 < run["auc"] < 1 and 0.3 < run["log_loss"] < 1
            assert run["step_ms_median"] > 0 and run["ranks_equal"] is True


def _shapes():
    """Weights (out, in) of the model that SMALL describes; a bias belongs to each Linear."""
    tables = [(rows, 4) for rows in table_rows(50)]
    linears = [(16, 13), (4, 16), (64, 4 + 27 * 26 // 2), (1, 64)]
    return tables + linears, [out for out, _ in linears]


def test_bytes_by_formula(results):
    """On 2 ranks a ring all-reduce sends as many bytes as the tensor has, an all-gather as well."""
    _, _, summary = results
    weights, biases = _shapes()
    numel = sum(n * m for n, m in weights) + sum(biases)
    # PowerSGD compresses a matrix where its two factors are less than half as large.
    powersgd = sum(n + m if 2 * (n + m) < n * m else n * m for n, m in weights) + sum(biases)
    # DCT: room for 1.25 x density, 4 bytes an entry.
    capacity = -(-int(numel * DENSITY * 125) // 100)
    blocks = -(-numel // 16384)

    def aligned(nbytes):
        return -(-nbytes // 16) * 16

    expected = {
        "dense": 4 * numel,
        "bf16": 2 * numel,
        "powersgd": 4 * powersgd,
        "dct": aligned(64 + 4 * (blocks + 1)) + 2 * aligned(2 * capacity),
    }
    for mode, runs in summary["modes"].items():
        assert {run["wire_bytes_per_step_per_rank"] for run in runs} == {expected[mode]}, mode


@pytest.mark.large
def test_nodes_of_two_ranks(tmp_path):
    done = _start(
        *("--rows", 1500, "--ranks", 4, "--local-size", 2, "--batch-size", 32),
        *("--density", DENSITY, "--out", tmp_path, *SMALL),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    (dense,), (dct,) = summary["modes"]["dense"], summary["modes"]["dct"]
    assert "node_bytes_per_step_per_rank" not in dense
    weights, biases = _shapes()
    numel = sum(n * m for n, m in weights) + sum(biases)
    # Inside, a reduce-scatter and an all-gather of half a bucket, and a word; a part is whole 16 B.
    part = 8 * -(-numel // 16)
    inside = dct["node_bytes_per_step_per_rank"]
    steps = summary["data"]["steps_per_epoch"] - 2
    once = 4 * part  # at the start, what is owed goes to whose part it is
    assert inside * steps == pytest.approx((8 * part + 4) * steps + once)
    plan = payload_layout(part, -(-int(part * DENSITY * 125) // 100), torch.bfloat16)
    assert dct["wire_bytes_per_step_per_rank"] == pytest.approx(plan.nbytes, rel=0.02)
    text = f"dct: bytes to other nodes; inside its node a rank sends {inside:,.0f} more"
    assert text in done.stdout
    # A ring through two ranks leaves their node once, as both ranks' parts together do.
    key = "wire_bytes_per_step_per_rank"
    assert f"{dense[key] / (2 * dct[key]):.1f}x" in done.stdout


def test_densities(results):
    _, _, summary = results
    assert {run["density_mean"] for run in summary["modes"]["dense"]} == {1.0}
    assert {run["density_mean"] for run in summary["modes"]["bf16"]} == {1.0}
    assert {run["density_mean"] for run in summary["modes"]["powersgd"]} == {None}
    for run in summary["modes"]["dct"]:
        assert 0.3 * DENSITY < run["density_mean"] <= 1.26 * DENSITY


def test_history_and_plot(results):
    _, folder, summary = results
    history = json.loads((folder / "history.json").read_text())
    steps = summary["data"]["steps_per_epoch"]
    for mode, runs in history.items():
        for run, result in zip(runs, summary["modes"][mode], strict=True):
            assert len(run["loss"]) == len(run["step_ms"]) == len(run["wire_bytes"]) == steps
            assert set(run["wire_bytes"][2:]) == {result["wire_bytes_per_step_per_rank"]}
    # Every mode starts from the same weights and the same batch.
    for seed in range(2):
        assert len({history[mode][seed]["loss"][0] for mode in history}) == 1
    assert history["dct"][0]["density"][-1][0] == steps
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_output_without_a_terminal(results):
    """A line per run, a table, no control characters."""
    output, _, summary = results
    for mode, runs in summary["modes"].items():
        for run in runs:
            assert f"{mode} seed {run['seed']}: AUC {run['auc']:.4f}" in output
    assert "Bayes" in output and "\u00b1" in output and "\x1b" not in output
    dense, dct = (summary["modes"][m][0]["wire_bytes_per_step_per_rank"] for m in ("dense", "dct"))
    assert f"{dense / dct:.1f}x" in output


@pytest.mark.large
def test_a_file_with_malformed_lines(tmp_path):
    path = tmp_path / "rows.tsv.gz"
    synthetic.write_tsv(path, seed=1, rows=400)
    content = gzip.decompress(path.read_bytes()).decode()
    path.write_bytes(gzip.compress(("a header\n" + content + line("7") + "\n").encode()))
    done = _start(
        *("--data", path, "--ranks", 1, "--modes", "dense"),
        *("--batch-size", 32, "--out", tmp_path, *SMALL),
    )
    assert done.returncode == 0, done.stderr
    assert "left out: 2 of 402 lines malformed (line 1: must have 40 fields" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["data"]["malformed"] == 2
    assert summary["config"]["rows"] is None
    assert summary["data"]["train_rows"] + summary["data"]["test_rows"] == 400
    assert "bayes" not in summary


def test_where_results_cannot_be_written_the_table_is_printed(tmp_path):
    path = tmp_path / "history.json"
    path.with_name(f"{path.name}.part").mkdir()
    done = _call_on_ranks(*("--rows", 1500, "--modes", "dct", "--out", tmp_path, *SMALL))
    assert done.returncode == 1 and "no model beats" in done.stdout
    assert done.stderr == f"train_dlrm.py: {path} cannot be written: Is a directory\n"
    assert not path.exists()


@pytest.mark.parametrize("start", _in_short(_call, _start))
def test_a_damaged_file_ends_the_command(start, tmp_path):
    """Found out by the ranks, far from the start of the file; told by the command, in a line."""
    path = tmp_path / "cut.tsv.gz"
    path.write_bytes(gzip.compress(bytes(100_000))[:-20])
    done = start("--data", path, "--out", tmp_path, *SMALL)
    assert done.returncode == 1
    assert f"train_dlrm.py: {path} must be readable to its end, got:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("start", _in_short(_call_on_ranks, _start_torchrun))
def test_under_torchrun_its_ranks_count(start, tmp_path):
    done = start(
        *("--ranks", 5, "--rows", 600, "--batch-size", 32, "--modes", "dct", "--out", tmp_path),
        *("--validation-fraction", 0.2),
        *SMALL,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["config"]["ranks"] == 2
    assert done.stdout.count("dct seed 0") == 1  # only rank 0 speaks
    (run,) = summary["modes"]["dct"]
    assert run["validation_auc"] != run["auc"] and 0.3 < run["validation_log_loss"] < 1
    assert f"validation AUC {run['validation_auc']:.4f}" in done.stdout
