"""The generator of rows.

The generator yields the rows of the published results. A row depends only on seed and number. The
best possible score is known.
"""

import numpy as np
import pytest

from dlrm.data import synthetic
from dlrm.data.features import MISSING, hash_values
from dlrm.scores import score

N = 60_000
GENERATOR = synthetic.Generator(3)
BLOCK = GENERATOR.rows(np.arange(N))


def test_rows_match_the_published_results():
    """The first 1,000 rows of seed 0 have these sums. Their click rate is about 0.25."""
    block = synthetic.Generator(0).rows(np.arange(1000))
    assert (block.labels.sum(), block.ints.sum(), block.values.sum()) == (257, 4306512, 858050)
    assert block.probability.sum() == pytest.approx(242.8818492)


def test_rows_depend_only_on_their_number():
    numbers = np.random.default_rng(0).permutation(2000)
    again = synthetic.Generator(3)
    for chunk in np.array_split(numbers, 7):
        for whole, part in zip(BLOCK, again.rows(chunk), strict=True):
            np.testing.assert_array_equal(whole[chunk], part)


def test_labels_are_drawn_with_the_true_probabilities():
    """The score on the labels is close to the one that the true probabilities imply."""
    p = np.sort(BLOCK.probability)
    wrong_order = np.cumsum(p) - p  # expected number of ones in rows ranked lower
    expected_auc = 1 - np.sum((1 - p) * wrong_order + 0.5 * p * (1 - p)) / (p.sum() * (1 - p).sum())
    expected_loss = -np.mean(p * np.log(p) + (1 - p) * np.log(1 - p))
    auc, loss, calibration = score(BLOCK.labels, BLOCK.probability)
    assert auc == pytest.approx(expected_auc, abs=0.008)
    assert loss == pytest.approx(expected_loss, abs=0.008)
    assert calibration == pytest.approx(1, abs=0.02)


def test_hashes_of_values():
    """The hash of a value, or of a missing one, depends only on the value and its column."""
    values = np.array([[5, 9], [5, 5], [MISSING, 2**63 - 1], [0, MISSING]])
    hashes = hash_values(values)
    assert hashes.dtype == np.int64 and hashes.min() >= 0
    assert hashes[0, 0] == hashes[1, 0]
    assert len(np.unique(hashes)) == 7
    assert (hash_values(values[2:]) == hashes[2:]).all()
