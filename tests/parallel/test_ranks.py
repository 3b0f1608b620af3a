"""Error messages of tests that run on several ranks."""

import pytest
import torch

from support.ranks import assert_same, run_ranks


def _differs(rank):
    tensor = torch.arange(6.0).view(2, 3)
    assert_same(tensor)
    tensor[1, 2] += 10 * (rank == 2)
    assert_same(tensor)


def test_assert_same_reports_rank_and_position():
    text = r"rank 2 in 1 of 6 elements, the first at \(1, 2\): 15.0 where rank 0 has 5.0"
    with pytest.raises(RuntimeError, match=text):
        run_ranks(_differs, 3)


def _fails(rank):
    found, expected = [7, 9 + rank], [7, 8]  # fails on all ranks, so none waits
    assert found == expected


def test_failed_assertion_reports_values_of_names():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: .*found = \[7, 10\]\n  expected = \[7, 8"):
        run_ranks(_fails, 2)
