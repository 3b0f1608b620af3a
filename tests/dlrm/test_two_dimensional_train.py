"""train_dlrm.py --parallel 2d end to end: against one group, bytes, replicas, refusals."""

import json
import subprocess
import sys

import pytest
import torch.distributed as dist
from programs import ROOT

from dlrm import arguments, loop
from dlrm.data import dataset
from dlrm.launch import launch
from dlrm.train import main

SMALL = ["--rows", "1500", "--batch-size", "64", "--hash-size", "50", "--embedding-dim", "8"]
SMALL += ["--bottom", "16", "--top", "64"]
ADAGRAD = ["--embedding-optimizer", "rowwise_adagrad", "--embedding-lr", "0.02"]
SCALED = ["--embedding-optimizer", "momentum_scaled_rowwise_adagrad", "--delayed-accumulator"]
PURPOSES = ("ids", "mp_forward", "mp_backward", "sync", "dp")


def _trained(mode, *given):
    options = arguments.parse([*SMALL, *given])
    model, run = loop.train(mode, 0, dataset.load(options), options, lambda step: None)
    if options.parallel != "data":
        model.close()
    return run


def _one_replica_is_hybrid():
    """Bit for bit: weights, losses and bytes: a sync does nothing, whatever it would send."""
    for mode, given in (
        ("dense", []),
        ("dense", ["--dedup", *ADAGRAD]),
        ("dct", ["--row-format", "int8", *ADAGRAD]),
    ):
        hybrid = _trained(mode, "--parallel", "hybrid", *given)
        single = _trained(mode, "--parallel", "2d", "--replicas", "1", *given)
        assert single.weights == hybrid.weights
        assert (single.loss == hybrid.loss).all()
        assert single.purposes.keys() == hybrid.purposes.keys()
        assert all((single.purposes[same] == sent).all() for same, sent in hybrid.purposes.items())


def test_one_replica_is_the_hybrid_run_bit_for_bit():
    launch(_one_replica_is_hybrid, 2)


def _groups_of_ranks():
    """2 x 2: with a sync every step the same as one group of 4; bytes of purposes."""
    before = set(dist.distributed_c10d._world.pg_map)
    grid = _trained("dense", "--parallel", "2d", "--replicas", "2", "--lr", "0.05")
    one_group = _trained("dense", "--parallel", "2d", "--replicas", "1", "--lr", "0.05")
    assert abs(grid.loss - one_group.loss).max() < 1e-5
    assert set(dist.distributed_c10d._world.pg_map) == before
    compressed = _trained("dct", "--parallel", "2d", "--sync-every", "3", *SCALED)
    for run in (grid, compressed):
        total = sum(run.purposes[purpose] for purpose in PURPOSES)
        assert (total == run.wire_bytes).all() and set(run.purposes) == set(PURPOSES)
    # Half of what crosses in one group stays on the rank: 13 tables of the other, of 64 samples.
    rows = 13 * 64 * 8
    assert (grid.purposes["mp_forward"] == 4 * rows).all()
    assert one_group.purposes["mp_forward"].mean() == pytest.approx(4 * 19.5 * 64 * 8)
    synced = compressed.purposes["sync"] > 0
    assert synced.tolist() == [step % 3 == 2 for step in range(len(synced))]
    assert 0 < compressed.purposes["sync"].max() < 0.5 * grid.purposes["sync"].max()


def test_two_groups_of_two():
    launch(_groups_of_ranks, 4)


@pytest.mark.large
def test_a_command_of_all_modes(tmp_path):
    command = [*SMALL, "--parallel", "2d", "--modes", "dense,bf16,dct", "--dedup", *ADAGRAD]
    command += ["--sync-density", "0.05", "--out", str(tmp_path)]
    command = [sys.executable, ROOT / "examples" / "train_dlrm.py", *command]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modes = json.loads((tmp_path / "summary.json").read_text())["modes"]
    sent = {mode: runs[0]["sync_bytes_per_step_per_rank"] for mode, runs in modes.items()}
    # Rows of 8 float32 and an accumulator, or of 8 bfloat16; ids and counts beside them.
    assert 0.5 < sent["bf16"] / sent["dense"] < 0.7
    assert sent["dct"] < 0.5 * sent["dense"]
    assert all(0.3 < runs[0]["auc"] < 1 for runs in modes.values())
    training = json.loads((tmp_path / "summary.json").read_text())["data"]["train_rows"]
    for said in (f"{training:,} training rows", "of each of 2 groups of ranks", "sync"):
        assert said in done.stdout


def test_ranks_that_are_no_groups(tmp_path, capsys):
    command = [*SMALL, "--parallel", "2d", "--replicas", "3", "--out", str(tmp_path)]
    assert main(command) == 1
    assert "--replicas must divide the 2 ranks, got 3" in capsys.readouterr().err
