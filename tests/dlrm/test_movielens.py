"""The reader of MovieLens's layout: what came before a rating, malformed lines, shares of ranks."""

import numpy as np
import pytest
import torch

from dlrm.data import movielens
from dlrm.data.features import Rows
from dlrm.errors import UsageError

# user, item, rating, time; not in the order of time
LINES = ["7 3 5 30", "7 4 2 10", "7 5 4 20", "2 3 4 25", "7 6 1 40", "2 9 5 50"]


def _write(tmp_path, lines):
    path = tmp_path / "u.data"
    path.write_text("".join(line.replace(" ", "\t") + "\n" for line in lines))
    return path


def test_a_row_knows_what_came_before_it(tmp_path):
    rows, numbers, tables, report = movielens.read(_write(tmp_path, LINES), 100)
    assert numbers.tolist() == [0, 1, 2, 3, 4, 5] and report.malformed == 0
    # Of users to 7 and items to 9: one row each, and the missing one's.
    assert tables == (9, 11, 11)
    assert rows.labels.tolist() == [1, 0, 1, 1, 0, 1]
    of_user, of_item = rows.ints.double().expm1().round().T.tolist()
    assert of_user == [2, 0, 1, 0, 3, 1]
    assert of_item == [1, 0, 0, 0, 0, 0]
    assert rows.ids[:, 0, 0].tolist() == [8, 8, 8, 3, 8, 3]
    assert rows.ids[:, 1, 0].tolist() == [4, 5, 6, 4, 7, 10]
    assert (rows.ids[:, :2, 1:] == -1).all()
    history = [[i - 1 for i in bag if i >= 0] for bag in rows.ids[:, 2].tolist()]
    assert history == [[5], [], [], [], [5, 3], [3]]


def test_the_history_is_of_the_last(tmp_path):
    many = [f"1 {item} 5 {item}" for item in range(1, 40)]
    rows, *_ = movielens.read(_write(tmp_path, many), 1000)
    assert (rows.ids[-1, 2] - 1).tolist() == list(range(39 - movielens.HISTORY, 39))


def test_tables_are_of_the_hash_size_at_most(tmp_path):
    rows, _, tables, _ = movielens.read(_write(tmp_path, LINES), 4)
    assert tables == (4, 4, 4) and rows.ids.max() == 3


def test_shares_of_ranks_make_up_the_file(tmp_path):
    path = _write(tmp_path, LINES)
    whole, _, tables, _ = movielens.read(path, 100)
    shares = [movielens.read(path, 100, rank, 2) for rank in range(2)]
    assert [share[2] for share in shares] == [tables, tables]
    together = Rows.concatenate([rows for rows, *_ in shares])
    order = torch.from_numpy(np.concatenate([numbers for _, numbers, *_ in shares]).argsort())
    for name in ("labels", "ints", "ids"):
        assert torch.equal(getattr(together, name)[order], getattr(whole, name))


@pytest.mark.parametrize(
    "line, reason",
    [
        ("1 2 3", "must have 4 fields, got 3"),
        ("1 x 3 4", "item must be an integer from 0, got 'x'"),
        ("-1 2 3 4", "user must be an integer from 0, got '-1'"),
        ("1 2 3 " + "9" * 19, "time must be an integer from 0, got '9999999999999999999'"),
        ("", "must have 4 fields, got 0"),
    ],
)
def test_malformed_lines_are_left_out(tmp_path, line, reason):
    rows, numbers, _, report = movielens.read(_write(tmp_path, [LINES[0], line, LINES[1]]), 100)
    assert len(rows) == 2 and numbers.tolist() == [0, 2]
    assert report.examples == [(2, reason)]


def test_a_file_without_rows(tmp_path):
    rows, numbers, _, report = movielens.read(_write(tmp_path, []), 100)
    assert len(rows) == len(numbers) == report.lines == 0
    with pytest.raises(UsageError, match="must be a file, got nothing"):
        movielens.read(tmp_path / "absent", 100)
