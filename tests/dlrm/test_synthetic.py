"""The generator: rows depend on seed and number alone, follow a power law, and carry a known best
score."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from dlrm.data import hashing, synthetic
from dlrm.data.features import CARDINALITIES, MISSING, name_values
from dlrm.scores import score

N = 60_000
GENERATOR = synthetic.Generator(3)
BLOCK = GENERATOR.rows(np.arange(N))


def test_rows_depend_on_their_number_alone():
    numbers = np.random.default_rng(0).permutation(2000)
    again = synthetic.Generator(3)
    for chunk in np.array_split(numbers, 7):
        for whole, part in zip(BLOCK, again.rows(chunk), strict=True):
            np.testing.assert_array_equal(whole[chunk], part)


def test_seeds_differ():
    other = synthetic.Generator(4).rows(np.arange(2000))
    for name in ("ints", "values"):
        assert (getattr(other, name) != getattr(BLOCK, name)[:2000]).mean() > 0.5


def test_values_follow_the_power_law():
    for table in (2, 9, 25):
        column = BLOCK.values[:, table]
        assert 1000 < column.max() < min(CARDINALITIES[table], 4000) - 1
        present = column[column >= 0]
        # P(value v) is the mass of x^-1.5 between v + 1 and v + 2, cut at the number of values.
        expected = -np.diff(np.arange(1.0, 12) ** -0.5) / (1 - 4000**-0.5)
        seen = np.bincount(present, minlength=10)[:10] / len(present)
        assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected / len(present)))


def test_probabilities_are_those_of_the_rows():
    for table in (0, 5, 8):
        share = GENERATOR.probabilities(table)
        assert share.sum() == pytest.approx(1)
        seen = np.bincount(BLOCK.values[:, table] + 1, minlength=len(share)) / N
        assert np.abs(seen - share).max() < 5 * np.sqrt(0.25 / N)


def test_ints_are_skewed_counts_with_missing_ones():
    missing = (BLOCK.ints == -1).mean(axis=0)
    assert BLOCK.ints.min() == -1 and missing.max() < 0.42 and missing.max() > 0.05
    for j in range(13):
        present = BLOCK.ints[:, j][BLOCK.ints[:, j] >= 0]
        assert np.mean(present) > 1.5 * np.median(present)


@pytest.mark.parametrize("seed", range(2))
def test_click_rate_and_difficulty(seed):
    block = synthetic.Generator(seed).rows(np.arange(20_000))
    assert block.labels.mean() == pytest.approx(0.25, abs=0.02)
    assert roc_auc_score(block.labels, block.probability) == pytest.approx(0.80, abs=0.015)


def test_labels_are_drawn_with_the_true_probabilities():
    """The score of the true probabilities is what they imply themselves, labels not looked at."""
    p = np.sort(BLOCK.probability)
    wrong_order = np.cumsum(p) - p  # expected ones among the rows ranked lower
    expected_auc = 1 - np.sum((1 - p) * wrong_order + 0.5 * p * (1 - p)) / (p.sum() * (1 - p).sum())
    expected_loss = -np.mean(p * np.log(p) + (1 - p) * np.log(1 - p))
    auc, loss, calibration = score(BLOCK.labels, BLOCK.probability)
    assert auc == pytest.approx(expected_auc, abs=0.008)
    assert loss == pytest.approx(expected_loss, abs=0.008)
    assert calibration == pytest.approx(1, abs=0.02)
    for low in np.arange(0.05, 0.9, 0.1):
        within = (BLOCK.probability >= low) & (BLOCK.probability < low + 0.1)
        rate, expected = BLOCK.labels[within].mean(), BLOCK.probability[within].mean()
        assert abs(rate - expected) < 5 * np.sqrt(0.25 / within.sum())


def test_the_teacher_looks_at_values_and_at_pairs():
    """The true logit is not a sum over columns: one column's effect depends on its partner."""

    def logit(values):
        p = _probability(values)
        return np.log(p / (1 - p))

    def _probability(values):
        ints = np.zeros((len(values), 13), dtype=np.int64)
        z = (GENERATOR._score(ints, values) - GENERATOR._mean) / GENERATOR._std
        return 1 / (1 + np.exp(-(synthetic.LOGIT_MEAN + synthetic.LOGIT_STD * z)))

    left, right = synthetic.PAIRS[0]
    lonely = next(t for t in range(26) if all(t not in pair for pair in synthetic.PAIRS))

    def interaction(a, b):
        grid = np.zeros((4, 26), dtype=np.int64)
        grid[[1, 3], a], grid[[2, 3], b] = 1, 1
        base, only_a, only_b, both = logit(grid)
        assert only_a != base
        return both - only_a - only_b + base

    assert abs(interaction(left, right)) > 1e-3
    assert abs(interaction(left, lonely)) < 1e-9


def test_random_numbers_are_uniform_and_normal():
    u = hashing.uniform(1, 2, np.arange(N))
    assert u.min() > 0 and u.max() < 1
    assert np.abs(np.bincount((u * 10).astype(int)) / N - 0.1).max() < 5 * 0.3 / np.sqrt(N)
    z = hashing.normal(1, 2, np.arange(N))
    for power, moment, spread in ((1, 0, 1), (2, 1, 2**0.5), (4, 3, 96**0.5)):
        assert abs(np.mean(z**power) - moment) < 5 * spread / np.sqrt(N)
    other = hashing.uniform(1, 3, np.arange(N))
    assert abs(np.corrcoef(u, other)[0, 1]) < 5 / np.sqrt(N)
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 5 / np.sqrt(N)


def test_names_of_values():
    """A name for each column and value, also for missing ones, whatever the other rows are."""
    values = np.array([[5, 9], [5, 5], [MISSING, 2**63 - 1], [0, MISSING]])
    names = name_values(values)
    assert names.dtype == np.int64 and names.min() >= 0
    assert names[0, 0] == names[1, 0]
    assert len(np.unique(names)) == 7
    assert (name_values(values[2:]) == names[2:]).all()
