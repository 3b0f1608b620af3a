"""bench/dp_transports.py: which runs there are, and what its table says of them."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "dp_transports.py"
sys.path.insert(0, str(BENCH.parent))
import dp_transports  # noqa: E402
from dp_transports import Run  # noqa: E402


def test_only_sparse_methods_have_densities_and_seeds_come_first():
    runs = dp_transports.all_runs(["dense", "reduce_scatter"], [0.01, 0.001], range(2))
    first = [Run("dense", None, 0), Run("reduce_scatter", 0.01, 0), Run("reduce_scatter", 0.001, 0)]
    assert runs == first + [run._replace(seed=1) for run in first]
    names = {run.path(Path()).name for run in runs}
    assert len(names) == len(runs) and "reduce_scatter_density0.001_seed1.json" in names


def _record(method, density, seed, loss, nbytes):
    summary = {"auc": 0.7, "log_loss": loss, "calibration": 1.1}
    summary["wire_bytes_per_step_max_rank"] = nbytes
    return Run(method, density, seed)._asdict() | {"summary": summary}


def test_the_table_compares_with_dense_seed_by_seed():
    records = [_record("reduce_scatter", 0.01, seed, 0.50 + seed / 50, 100) for seed in (1, 0)]
    records += [_record("reduce_scatter before", 0.01, 0, 0.60, 100)]
    records += [_record("dense", None, seed, 0.49 + seed / 100, 4000) for seed in (0, 1, 2)]
    head, rule, *rows = dp_transports.report(records).splitlines()
    assert head.count("|") == rule.count("|")
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [row[0] for row in cells] == ["dense", "reduce_scatter 1 %", "reduce_scatter before 1 %"]
    assert cells[0][1:4] == ["4,000", "1.0x", "3"]
    assert cells[1][1:4] == ["100", "40.0x", "2"]
    assert cells[1][5:8] == ["0.5100 ± 0.0141", "0.5200", "1.1000 ± 0.0000"]
    assert cells[1][8:] == ["+0.0150 ± 0.0050", "+0.0200"]  # +0.01 and +0.02, and the error
    assert cells[2][8:] == ["+0.1100 ± nan", "+0.1100"]


@pytest.mark.large
def test_a_command_goes_on_where_it_was(tmp_path):
    small = ["--rows", "600", "--batch-size", "32", "--hash-size", "20", "--embedding-dim", "4"]
    small += ["--bottom", "8", "--top", "64", "--densities", "0.05", "--out", str(tmp_path)]

    def run(*more):
        command = [sys.executable, str(BENCH), *small, *more]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "1 of 3: dense, seed 0" in run("--methods", "dense,topk,all_gather", "--seeds", "1")
    again = run("--methods", "dense,all_gather,reduce_scatter", "--seeds", "1")
    assert "1 of 1: reduce_scatter 5 %, seed 0" in again  # the others are there
    assert again.count("| 1 |") == 4
    assert {"report.md", "quality.png"} <= {path.name for path in tmp_path.iterdir()}
