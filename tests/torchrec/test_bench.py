"""bench.experiments.torchrec_dlrm, with TorchRec itself (make torchrec)."""

import json
import subprocess
import sys

import pytest
from programs import ROOT

pytest.importorskip("fbgemm_gpu", reason="TorchRec is in the environment of make torchrec")

SMALL = "--rows 700 --hash-size 50 --embedding-dim 64 --batch-size 32 --bottom 256 --top 16-16"
ROWS = 32 * 13  # that a rank sends: of 13 tables, to 32 samples of the other
BYTES = {  # of an embedding of 64, and of its gradient
    "float32": (256, 256),
    "fp16": (128, 128),
    "int8": (80, 80),  # 32 and a float32 scale and offset, twice
    "mx4": (34, 34),
    "int4,sign": (34, 10),
    "int4,int4+hook": (34, 34),
}


def test_the_bench_counts_what_exchanges_send(tmp_path):
    command = [sys.executable, "-m", "bench.experiments.torchrec_dlrm", *SMALL.split()]
    command += ["--seeds", "1", "--rates", "0.01", "--out", tmp_path, "--exchanges", *BYTES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    names = {name: name.replace(",", "-").replace("+", "-") for name in BYTES}
    found = {
        name: json.loads((tmp_path / f"{file}_lr0.01_seed1.json").read_text())
        for name, file in names.items()
    }
    for name, record in found.items():
        sent = record["bytes"]
        assert tuple(sent.values()) == tuple(ROWS * size for size in BYTES[name]), name
        assert 0.3 < record["test"]["auc"] < 1
    losses = {record["test"]["loss"] for record in found.values()}
    assert len(losses) == len(BYTES)
    assert (tmp_path / "report.md").read_text() in done.stdout
