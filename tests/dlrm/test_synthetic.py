"""The generator: rows depend on seed and number alone, follow a power law, and carry a known best
score."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from dlrm.data import hashing, synthetic
from dlrm.data.dataset import _generate
from dlrm.data.features import CARDINALITIES, EMPTY, MISSING, table_rows
from dlrm.loop import score

N = 60_000
GENERATOR = synthetic.Generator(3)
BLOCK = GENERATOR.rows(np.arange(N))


@pytest.mark.parametrize("most", [1, 3])
def test_a_rank_may_have_no_rows(most):
    rows, probability = _generate(np.arange(0), table_rows(50), most, None)
    assert len(rows) == len(probability) == 0
    assert rows.ids.shape == (0, 26, 3)[: 2 + (most > 1)]


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


@pytest.mark.parametrize("zipf", [None, synthetic.Zipf(3, 20_000, 1.1)])
def test_values_follow_the_power_law(zipf):
    block = BLOCK if zipf is None else synthetic.Generator(3, zipf=zipf).rows(np.arange(N))
    law, rows = (-0.5, 4000) if zipf is None else (-0.1, 20_000)
    for table in (2, 9, 25) if zipf is None else range(3):
        column = block.values[:, table]
        most = min(CARDINALITIES[table], 4000) if zipf is None else zipf.rows
        assert most / 4 < column.max() < most - 1
        present = column[column >= 0]
        assert zipf is None or len(present) == N
        # P(value v) is the mass of x^-1.5 between v + 1 and v + 2, cut at the number of values.
        edges = np.arange(1.0, 12) ** law
        expected = -np.diff(edges) / (1 - rows**law)
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


@pytest.mark.parametrize("zipf", [None, synthetic.Zipf(3, 20_000, 1.1)])
@pytest.mark.parametrize("seed", range(2))
def test_click_rate_and_difficulty(seed, zipf):
    block = synthetic.Generator(seed, zipf=zipf).rows(np.arange(20_000))
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


def test_bags():
    """Of rows without several values the first of each bag; labels by sums over all of them."""
    generator, most, n = synthetic.Generator(3, most=4), 4, 20_000
    block = generator.rows(np.arange(n))
    for whole, part in zip(block, generator.rows(np.arange(500, 900)), strict=True):
        np.testing.assert_array_equal(whole[500:900], part)
    assert block.values.shape == (n, 26, most)
    np.testing.assert_array_equal(block.values[:, :, 0], BLOCK.values[:n])
    np.testing.assert_array_equal(block.ints, BLOCK.ints[:n])
    there = block.values >= 0
    assert (there[:, :, 1:] <= there[:, :, :-1]).all()  # nothing behind an empty place
    assert ((block.values[:, :, 1:] == EMPTY) == ~there[:, :, 1:]).all()
    lengths = there.sum(2)
    for table in (0, 9, 25):
        present = lengths[:, table][block.values[:, table, 0] != MISSING]
        seen = np.bincount(present, minlength=most + 1) / len(present)
        assert seen[0] == 0 and np.abs(seen[1:] - 1 / most).max() < 5 * np.sqrt(0.25 / n)
        first, second = (block.values[:, table, k][there[:, table, k]] for k in (0, 1))
        assert abs((second == 0).mean() - (first == 0).mean()) < 0.03  # of one distribution
    auc = roc_auc_score(block.labels, block.probability)
    assert 0.78 < auc < 0.82
