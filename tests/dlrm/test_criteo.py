"""Generated rows, and the reader of Criteo's layout: values and ranks."""

import math
import zlib

import numpy as np
import pytest
import torch

from criteo_lines import INTS, line, write_rows
from dlrm.data import criteo, synthetic
from dlrm.data.features import CARDINALITIES, Rows, table_rows

ROWS = table_rows(100)


def _write(tmp_path, *lines):
    path = tmp_path / "rows.tsv"
    path.write_text("".join(text + "\n" for text in lines))
    return path


def test_generated_rows_match_the_published_results():
    """The first 1,000 rows of seed 0 have these sums. A row depends only on seed and number."""
    block = synthetic.Generator(0).rows(np.arange(1000))
    assert (block.labels.sum(), block.ints.sum(), block.values.sum()) == (257, 4306512, 858050)
    assert block.probability.sum() == pytest.approx(242.8818492)
    part = synthetic.Generator(0).rows(np.arange(9, 3, -1))
    np.testing.assert_array_equal(part.values, block.values[9:3:-1])
    np.testing.assert_array_equal(part.labels, block.labels[9:3:-1])


def test_values_of_a_row(tmp_path):
    rows, numbers, report = criteo.read(_write(tmp_path, line(label="1")), ROWS)
    assert rows.labels.tolist() == [1] and numbers.tolist() == [0]
    assert report == (1, 0, None)
    expected = [math.log1p(max(int(x), 0)) if x else 0.0 for x in INTS]
    assert rows.ints.dtype == torch.float32
    assert rows.ints[0].tolist() == pytest.approx(expected, rel=1e-6)
    # Row 0 is for missing values, 1 + number % (rows - 1) for others. Tables have at most 100 rows.
    ids = rows.ids[0].tolist()
    assert ids[0] == 1 + 1
    assert ids[1] == 0
    assert ids[2] == 1 + 11
    assert ids[3] == 1 + 0xDEADBEEF % 99
    assert ids[4] == 1 + zlib.crc32(b"not-hex") % 99
    assert ids[5:] == [1 + 42 % (min(n, 100) - 1) for n in CARDINALITIES[5:]]


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_generated_rows_are_read_back(tmp_path, monkeypatch, name, world_size):
    """Rows in a file equal the generated rows, with any name. Each rank reads its own rows."""
    monkeypatch.setattr(criteo, "LINES_PER_CHUNK", 64)
    path = write_rows(tmp_path / name, seed=5, rows=500).rename(tmp_path / "rows")
    block = synthetic.Generator(5).rows(np.arange(500))
    whole = Rows.encode(block.labels, block.ints, block.values, ROWS)
    for rank in range(world_size):
        rows, numbers, report = criteo.read(path, ROWS, rank, world_size)
        indices = torch.arange(rank, 500, world_size)
        assert numbers.tolist() == indices.tolist() and report.malformed == 0
        assert torch.equal(rows.labels, whole.labels[indices])
        assert torch.equal(rows.ints, whole.ints[indices])
        assert torch.equal(rows.ids, whole.ids[indices])
