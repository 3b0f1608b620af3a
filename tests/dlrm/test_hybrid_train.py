"""train_dlrm.py --parallel hybrid end to end: bytes of every purpose by formula, learning rates."""

import dataclasses
import io
import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from dlrm import arguments, loop, report
from dlrm.data import dataset
from dlrm.data.features import table_rows
from dlrm.launch import launch
from dlrm.models.dlrm import DLRM
from dlrm.train import main

RANKS, BATCH, DIM, K = 2, 64, 8, 2  # density 0.25 of 8
COUNTS = 40  # to the other rank: how many ids, in bags of what length; what must be the same
LINEARS = [(16, 13), (DIM, 16), (64, DIM + 27 * 26 // 2), (1, 64)]
PURPOSES = ("ids", "mp_forward", "mp_backward", "dp")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{mode: its run}."""
    folder = tmp_path_factory.mktemp("hybrid")
    command = ["--parallel", "hybrid", "--modes", "dense,bf16,powersgd,dct", "--rows", "1500"]
    command += ["--batch-size", str(BATCH), "--embedding-dim", str(DIM), "--hash-size", "50"]
    command += ["--bottom", "16", "--top", "64", "--row-density", "0.25", "--out", str(folder)]
    assert main(command) == 0
    summary = json.loads((folder / "summary.json").read_text())
    return {mode: runs[0] for mode, runs in summary["modes"].items()}


def _sent(run):
    return {purpose: run[f"{purpose}_bytes_per_step_per_rank"] for purpose in PURPOSES}


def test_bytes_by_formula(results):
    """A rank sends the other ids of 13 tables, one a bag, and as many embeddings of a sample."""
    rows = 13 * BATCH
    ids = COUNTS + 4 * rows
    numel = sum(out * (inputs + 1) for out, inputs in LINEARS)
    sent = {mode: _sent(run) for mode, run in results.items()}
    whole = rows * DIM
    for mode, size in (("dense", 4), ("bf16", 2)):
        rows_and_mlps = {"mp_forward": whole, "mp_backward": whole, "dp": numel}
        expected = {purpose: size * count for purpose, count in rows_and_mlps.items()}
        assert sent[mode] == expected | {"ids": ids}
    assert sent["powersgd"] == sent["dense"] | {"dp": sent["powersgd"]["dp"]}
    assert sent["powersgd"]["dp"] < sent["bf16"]["dp"]
    # Bfloat16 values; positions as a bitmap of 8 bits; nothing but values back.
    assert sent["dct"]["ids"] == ids
    assert sent["dct"]["mp_forward"] == rows * (2 * K + 1)
    assert sent["dct"]["mp_backward"] == rows * 2 * K
    assert sent["dct"]["dp"] < 0.1 * sent["dense"]["dp"]


def test_the_parts_make_up_the_whole(results):
    for run in results.values():
        assert sum(_sent(run).values()) == run["wire_bytes_per_step_per_rank"]
        assert run["ranks_equal"] is True and 0.3 < run["auc"] < 1


def _uneven():
    """Three ranks own 9, 9 and 8 of the 26 tables, so they do not send alike."""
    options = arguments.parse(
        ["--rows", "900", "--batch-size", "64", "--hash-size", "50", "--parallel", "hybrid"]
    )
    own = {}

    class Kept(loop.Traffic):
        def __exit__(self, *error):
            own.update(wire=self.wire, **self.purposes)
            super().__exit__(*error)

    loop.Traffic = Kept
    _, run = loop.train("dense", 0, dataset.load(options), options, lambda loss: None)
    every = [None] * 3
    dist.all_gather_object(every, own)
    sent = np.array([rank["wire"] for rank in every])
    assert sent[:, -1].min() < sent[:, -1].max()
    assert np.allclose(run.wire_bytes, sent.mean(0)) and (run.wire_bytes_max == sent.max(0)).all()
    for purpose in PURPOSES:
        assert np.allclose(run.purposes[purpose], np.mean([rank[purpose] for rank in every], 0))
    result = run.summary()
    assert result["wire_bytes_per_step_per_rank"] < result["wire_bytes_per_step_max_rank"]
    for purpose in PURPOSES:
        assert (run.purposes_max[purpose] == np.max([rank[purpose] for rank in every], 0)).all()
    assert result["ids_bytes_per_step_per_rank"] < result["ids_bytes_per_step_max_rank"]
    console = Console(width=100, record=True, file=io.StringIO())
    report.print_table(console, {"dense": [dataclasses.replace(run, auc=0.5, log_loss=0.7)]}, None)
    for heading, number in (("bytes/step", "_per_rank"), ("at most", "_max_rank")):
        assert heading in (text := console.export_text(clear=False))
        assert f"{result[f'wire_bytes_per_step{number}']:,.0f}" in text


def test_bytes_are_the_mean_and_the_most_of_all_ranks():
    launch(_uneven, 3)


def test_with_a_mesh_gradients_alone_are_compared():
    """By what leaves a node of two: rows go to all ranks, and have no part in that."""

    def run(dp, **node):
        sent = {name: np.full(3, 100.0) for name in PURPOSES} | {"dp": np.full(3, dp)} | node
        wire = np.sum([sent[name] for name in PURPOSES], 0)
        steps = np.ones(3)
        return loop.Run(0, 0.5, 0.7, None, steps, steps, wire, wire, "", [], sent, sent)

    runs = {"dense": [run(8000.0)], "dct": [run(400.0, node=np.full(3, 9000.0))]}
    console = Console(width=120, record=True, file=io.StringIO())
    report.print_table(console, runs, None, local_size=2)
    total, note, rows = [
        line.split()
        for line in console.export_text().splitlines()
        if line.split()[:1] != ["dense"] and "dct" in line
    ]
    assert total[-2:] == ["-", "1.0"] and "DP" in note
    assert rows == ["dct", "100", "100", "100", "1.0x", "400", "10.0x"]


def test_bytes_of_distinct_rows_in_few_bits(tmp_path):
    """As many ids as rows, which are fewer than the samples'."""
    command = ["--parallel", "hybrid", "--modes", "dct", "--rows", "1500", "--hash-size", "50"]
    command += ["--batch-size", str(BATCH), "--embedding-dim", str(DIM), "--bottom", "16"]
    command += ["--top", "64", "--row-format", "int4,sign", "--dedup", "--out", str(tmp_path)]
    assert main(command) == 0
    sent = _sent(json.loads((tmp_path / "summary.json").read_text())["modes"]["dct"][0])
    # What one rank asks the other answers; these are means over both.
    asked = (sent["ids"] - COUNTS) / 4
    assert 0 < asked < 0.5 * 13 * BATCH
    assert sent["mp_backward"] == pytest.approx(asked * (DIM / 8 + 2))
    assert sent["mp_forward"] == pytest.approx(asked * (DIM / 2 + 2))


SHORT = ["--rows", "600", "--batch-size", "64", "--hash-size", "50", "--top", "32"]


def _train_with_tables_that_stand_still(parallel):
    options = arguments.parse([*SHORT, "--parallel", parallel, "--embedding-lr", "1e-30"])
    model, _ = loop.train("dense", 0, dataset.load(options), options, lambda loss: None)
    torch.manual_seed(0)
    rows = table_rows(options.hash_size)
    fresh = DLRM(rows, options.embedding_dim, options.bottom, options.top)
    named = {
        name.split("module.")[-1].removeprefix("model."): p for name, p in model.named_parameters()
    }
    named |= {f"tables.{table}.weight": weight for table, weight in enumerate(_tables(model))}
    for name, weight in fresh.named_parameters():
        assert torch.equal(named[name], weight) == name.startswith("tables."), name


@pytest.mark.parametrize("parallel", ["data", "hybrid"])
def test_tables_have_a_learning_rate_of_their_own(parallel):
    launch(_train_with_tables_that_stand_still, 1, parallel)


def _first_steps(parallel):
    """Tables after the first steps of AdaGrad against its first steps: lr for an entry's sign."""
    adagrad = ["--embedding-optimizer", "rowwise_adagrad", "--embedding-lr", "0.03"]
    options = arguments.parse([*SHORT, *adagrad, "--parallel", parallel, "--embedding-dim", "1"])
    model, _ = loop.train("dense", 0, dataset.load(options), options, lambda loss: None)
    torch.manual_seed(0)
    fresh = DLRM(table_rows(50), 1, options.bottom, options.top).tables
    pairs = zip(_tables(model), fresh, strict=True)
    moved = torch.cat([(table - start.weight).abs() for table, start in pairs]).detach()
    # A row that was met once has moved by lr, whatever its gradient; none by more in a step.
    assert ((moved - 0.03).abs() < 1e-6).sum() > 20
    assert (moved == 0).sum() > 0 and moved.max() < 0.03 * 7


def _tables(model):
    """The weights of all, which one rank has."""
    if hasattr(model, "tables"):
        return model.tables.shards().values()
    return [table.weight for table in model.module.tables]


@pytest.mark.parametrize("parallel", ["data", "hybrid"])
def test_tables_have_an_optimizer_of_their_own(parallel):
    launch(_first_steps, 1, parallel)
