"""experiments.mp_formats: names of exchanges, factors and pairs; finished runs are not repeated."""

import argparse
import json
import subprocess
import sys

import pytest
import torch
from programs import ROOT

from dct_parallel import RowFormat
from experiments import mxfp4
from experiments.mp_formats import Kind


def _run(*given):
    command = [sys.executable, "-m", "experiments.mp_formats", *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT / "bench")


@pytest.mark.parametrize(
    "name, kind, bytes_of_64",
    [
        ("float32", Kind(RowFormat("float32"), False), (256, 256)),
        ("int4,sign+dedup", Kind(RowFormat("int4", "sign"), True), (34, 10)),
        ("int4,ternary", Kind(RowFormat("int4", "ternary"), False), (34, 15)),
        ("mxfp4", Kind(None, False), (34, 34)),
        ("7.5%+dedup", Kind(RowFormat("bfloat16", density=0.075), True), (15, 10)),
    ],
)
def test_names_of_exchanges(name, kind, bytes_of_64):
    assert Kind.parse(name) == kind
    assert kind.row_bytes(64) == bytes_of_64


@pytest.mark.parametrize(
    "name", ["int5", "int4,", "mxfp4,int4", "int4+", "int4+once", "0%", "101%", "x%", ""]
)
def test_a_wrong_name(name):
    with pytest.raises(argparse.ArgumentTypeError, match="must"):
        Kind.parse(name)


def test_mxfp4():
    """Ties to even, saturation, signs, and groups of 32 on their own; NaN fills its group alone."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.5, -0.25, -6.0]
    rows = mxfp4.quantize(torch.tensor([ties]))
    assert rows.tolist() == [[0x20, 0x42, 0x64, 0x76, 0xF8, 127]]
    arrived = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -6.0]
    assert mxfp4.dequantize(rows, 10).tolist() == [arrived]
    x = torch.tensor([[2.0**-149] * 32 + [2.0**127] * 32 + [float("nan")]])
    rows = mxfp4.quantize(x)
    assert rows.shape[1] == mxfp4.row_bytes(65) and rows[0, -3:].tolist() == [0, 252, 255]
    there = mxfp4.dequantize(rows, 65)
    assert there[0, :32].eq(0).all() and there[0, 32:64].eq(2.0**127).all() and there[0, 64].isnan()


@pytest.mark.large
def test_the_bench_runs_and_goes_on_where_it_was(tmp_path):
    small = "--rows 1500 --hash-size 50 --embedding-dim 16 --bottom 8 --top 16 --seeds 1"
    exchanges = ["--exchanges", "float32", "int4,sign+dedup", "--rates", "0.1,1e30"]
    done = _run(*small.split(), "--out", tmp_path, *exchanges)
    assert done.returncode == 0, done.stderr
    records = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(records) == 2 * (2 + 1)
    for name in ("float32", "int4-sign+dedup"):
        assert records[f"{name}_lr1e+30_seed0.json"]["diverged"] is True
        chosen, tested = (records[f"{name}_lr0.1_seed{seed}.json"] for seed in (0, 1))
        assert "test" not in chosen and "auc" not in chosen
        assert 0.3 < tested["test"]["auc"] < 1 and tested["test"] != tested["validation"]
    sent = records["int4-sign+dedup_lr0.1_seed1.json"]
    rows = (sent["ids_bytes_per_step_per_rank"] - 40) / 4  # but for their counts
    assert 0 < rows < 0.5 * 128 * 13
    assert sent["mp_forward_bytes_per_step_per_rank"] == pytest.approx(rows * (8 + 2))
    assert sent["mp_backward_bytes_per_step_per_rank"] == pytest.approx(rows * (2 + 2))
    assert sent["distinct_float32_bytes_per_step_per_rank"] == pytest.approx(rows * 2 * 4 * 16)
    assert (tmp_path / "report.md").read_text() in done.stdout
    (tmp_path / "float32_lr0.1_seed1.json").unlink()
    again = _run(*small.split(), "--out", tmp_path, *exchanges)
    assert again.stdout.startswith("1 of 1: float32, lr 0.1, seed 1: validation AUC")
    assert again.stdout.count("validation AUC") == 1


@pytest.mark.large
@pytest.mark.parametrize(
    "extra", [["--exchanges", "int5"], ["--rates", "0"], ["--validation-fraction", "0"]]
)
def test_a_wrong_argument_is_named(extra):
    done = _run(*extra)
    assert done.returncode != 0 and extra[0] in done.stderr
