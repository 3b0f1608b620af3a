"""two_dimensional.py and substitution.py on rows in Criteo's format: bytes and losses."""

import re

import numpy as np
import pytest
import torch.distributed as dist

import substitution
import two_dimensional
from criteo_lines import write_rows
from dlrm.data.dataset import load
from dlrm.launch import launch
from support.programs import called, run_as_torchrun

BATCH = 64


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of 3,000 rows in Criteo's format."""
    return write_rows(tmp_path_factory.mktemp("rows") / "train.txt", 2, 3000)


def _runs(program, names, hash_size, path, *given):
    options = program.parse(["--data", str(path), "--batch-size", str(BATCH), *given])
    data = load(options.data, options.rows, hash_size, options.batch_size)
    return [program.run(name, data, options, lambda: None) for name in names]


def _grids(path):
    """Run 4 ranks as a 2 x 2 mesh, and as 4 replicas."""
    grid = ("--ranks", "4", "--sync-every", "4", "--replicas")
    dense, compressed = _runs(two_dimensional, [False, True], 50, path, *grid, "2")
    (replicas,) = _runs(two_dimensional, [False], 50, path, *grid, "4")
    steps = len(dense.record.loss)
    assert steps == 9
    for other in (compressed, replicas):
        np.testing.assert_allclose(other.record.loss[0], dense.record.loss[0], rtol=1e-4)
        np.testing.assert_allclose(other.record.loss, dense.record.loss, atol=0.03)
        assert 0.3 < other.scores.auc < 1
    assert (compressed.record.loss != dense.record.loss).any()
    for result in (dense, compressed, replicas):
        assert (result.record.sent["sync"] > 0).tolist() == [step % 4 == 3 for step in range(steps)]
    sent, compressed_sent = dense.record.sent, compressed.record.sent
    assert (replicas.record.sent["rows"] == 0).all()
    # Rows have 16 float32 entries, or 16 int8 entries and a scale.
    np.testing.assert_allclose(compressed_sent["rows"] / sent["rows"], 18 / 64)
    assert compressed_sent["sync"].sum() < 0.3 * sent["sync"].sum()
    assert compressed_sent["gradients"][2:].max() < 0.05 * sent["gradients"].min()


def test_shards_and_replicas(rows):
    launch(_grids, 4, rows)


def _substitution(path):
    names = ("one process", "dense", "compressed")
    given = ("--capacity", "20000", "--lr", "0.1")
    groups = set(dist.distributed_c10d._world.pg_map)
    alone, dense, compressed = _runs(substitution, names, None, path, *given)
    assert set(dist.distributed_c10d._world.pg_map) == groups  # no groups remain
    assert len(alone.record.loss) == 18
    np.testing.assert_allclose(dense.record.loss, alone.record.loss, rtol=1e-4)
    assert dense.scores == pytest.approx(alone.scores, rel=1e-3)
    assert dense.record.loss[-6:].mean() < dense.record.loss[:6].mean()
    assert (alone.record.total == 0).all()
    assert (compressed.record.loss != dense.record.loss).any()
    np.testing.assert_allclose(compressed.record.loss, dense.record.loss, atol=0.03)
    # Per sample: a linear term, the factorization machine's sums and squares, 26 pooled embeddings.
    partial = 4 * BATCH * (1 + 16 + 1 + 26 * 16)
    mlp = (13 + 26 * 16 + 1) * 256 + 257 * 128 + 129
    for result in (dense, compressed):
        for purpose in ("rows", "rows back"):
            assert (result.record.sent[purpose] == partial).all()
    assert (dense.record.sent["gradients"] == 4 * mlp).all()
    assert compressed.record.sent["gradients"][2:].max() < 0.05 * 4 * mlp


def test_equivalent_substitution_trains_like_one_process(rows):
    launch(_substitution, 2, rows)


PROGRAMS = {
    "two_dimensional": (two_dimensional, "dense|compressed", ["--replicas", "2"]),
    "substitution": (substitution, "one process|dense|compressed", ["--capacity", "20000"]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_table(rows, name):
    """Rank 0 compares the dense run with the compressed one. Rank 1 prints nothing."""
    program, variants, given = PROGRAMS[name]
    given = ["--data", rows, "--batch-size", 256, *given]
    (status, text, error), second = run_as_torchrun(called, 2, program.main, *given)
    assert (status, second) == (0, (0, "", "")), error
    lines = re.finditer(rf"^ ({variants})  +(.*)$", text, re.MULTILINE)
    table = {words[1]: words[2].split() for words in lines}
    assert list(table) == variants.split("|")
    assert all(0.3 < float(row[0]) < 1 and 0.3 < float(row[1]) < 1 for row in table.values())
    assert table["dense"][-1] == "1.0x" and float(table["compressed"][-1][:-1]) > 1.3
