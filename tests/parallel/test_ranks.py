"""What is said when ranks differ, or one of them fails an assertion."""

import pytest
import torch

from ranks import assert_same, run_ranks


def _differs(rank):
    tensor = torch.arange(6.0).view(2, 3)
    assert_same(tensor)
    tensor[1, 2] += 10 * (rank == 2)
    assert_same(tensor)


def test_it_says_which_rank_differs_and_where():
    said = r"rank 2 in 1 of 6 elements, the first at \(1, 2\): 15.0 where rank 0 has 5.0"
    with pytest.raises(RuntimeError, match=said):
        run_ranks(_differs, 3)


def _fails(rank):
    found, expected = [7, 9 + rank], [7, 8]  # on all ranks: none is waited for
    assert found == expected


def test_it_says_what_the_names_of_a_failed_assertion_were():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: .*found = \[7, 10\]\n  expected = \[7, 8"):
        run_ranks(_fails, 2)
