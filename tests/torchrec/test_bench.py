"""bench.experiments.torchrec_dlrm together with TorchRec (make torchrec)."""

import json
import subprocess
import sys

import pytest

from support.programs import ROOT

pytest.importorskip("fbgemm_gpu", reason="TorchRec is in the environment of make torchrec")

SMALL = "--rows 700 --hash-size 50 --embedding-dim 64 --batch-size 32 --bottom 256 --top 16-16"
# Rows sent by a rank for 32 samples of the other rank, from 13 tables, or row-wise from all 26.
ROWS = {"": 32 * 13, "row_wise": 32 * 26}
BYTES = {  # {exchange: (bytes of an embedding of 64 entries, of its gradient)}
    "float32": (256, 256),
    "fp16": (128, 128),
    "int8": (80, 80),  # twice 32 entries with a float32 scale and offset
    "mx4": (34, 34),
    "int4,sign": (34, 10),
    "int4,int4+hook": (34, 34),
}


@pytest.mark.parametrize("problem", ROWS)
def test_the_bench_counts_the_bytes_of_exchanges(problem, tmp_path):
    refused = ("int8", "mx4", "int4,int4+hook") if problem else ()
    exchanges = [name for name in BYTES if name not in refused]
    command = [sys.executable, "-m", "bench.experiments.torchrec_dlrm", *SMALL.split()]
    command += ["--seeds", "1", "--rates", "0.01", "--out", tmp_path, "--exchanges", *exchanges]
    command += ["--row-wise"] * bool(problem)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = {}
    for name in exchanges:
        file = f"{problem}_{name}_lr0.01_seed1.json".lstrip("_").replace(",", "-").replace("+", "-")
        found[name] = json.loads((tmp_path / file).read_text())
    for name, record in found.items():
        sent = record["bytes"]
        assert tuple(sent.values()) == tuple(ROWS[problem] * size for size in BYTES[name]), name
        assert 0.3 < record["test"]["auc"] < 1
    losses = {record["test"]["loss"] for record in found.values()}
    assert len(losses) == len(exchanges)
    assert (tmp_path / "report.md").read_text() in done.stdout
