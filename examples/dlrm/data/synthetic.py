"""Generates rows like Criteo's from a known teacher, so that the best possible score is known.

A row depends only on the seed and the row number, and not on the chunk or the rank. The label is 1
with probability sigmoid(logit). The logit is the sum of an effect of every categorical value,
interactions of some pairs of values (dot products of latent vectors), and a weighted sum of
log(1 + integer).
"""

from typing import NamedTuple

import numpy as np

from . import hashing
from .features import CARDINALITIES, INTS, MISSING, encode_ints

# Smaller than in Criteo, because models cannot learn from values that occur once in a million rows.
MAX_CARDINALITY = 4000
EXPONENT = 1.5  # exponent of the power law
PAIRS = ((1, 4), (0, 7), (10, 17), (12, 18), (13, 22), (2, 24))  # pairs of tables that interact
LATENT_DIM = 4
VALUES_SHARE, PAIRS_SHARE, INTS_SHARE = 0.60, 0.15, 0.25  # fractions of the logit's variance
# Normal logits with these parameters give a click rate of 0.25 and a best possible AUC of 0.80.
LOGIT_MEAN, LOGIT_STD = -1.45, 1.35
MAX_INT = 10**6
PILOT_ROWS = 2**15

# First random stream of each kind of number. Each kind has a thousand streams.
_VALUE, _INTEGER, _LABEL, _EFFECT, _LATENT, _SETTING = range(0, 6000, 1000)


class Block(NamedTuple):
    """Generated rows; missing values are -1.

    labels: int64 [n]; ints: int64 [n, 13]; values: int64 [n, 26]; probability: float64 [n], the
    true probability of label 1.
    """

    labels: np.ndarray
    ints: np.ndarray
    values: np.ndarray
    probability: np.ndarray


class Generator:
    """Generates rows in Criteo's layout from a teacher.

    The probability of value v of a column is roughly proportional to (v + 1)^-1.5. The distribution
    of log(1 + integer) is roughly exponential. Up to 40 % of the values of a column are missing.

    Args:
        seed: integer >= 0, the seed of the teacher and of the rows.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        # Cardinalities include "missing".
        self.counts = np.minimum(CARDINALITIES, MAX_CARDINALITY) - 1
        columns, ints = np.arange(len(self.counts)), np.arange(INTS)
        self.missing = 0.4 * hashing.uniform(seed, _SETTING, columns) ** 2
        self._int_missing = 0.4 * hashing.uniform(seed, _SETTING + 1, ints) ** 2
        self._int_scale = 0.5 + 1.5 * hashing.uniform(seed, _SETTING + 2, ints)
        self._int_weight = _scaled(hashing.normal(seed, _SETTING + 3, ints), INTS_SHARE)
        value_weight = _scaled(0.3 + hashing.uniform(seed, _SETTING + 4, columns), VALUES_SHARE)
        self._effect = [value_weight[t] * self._drawn(t, _EFFECT + t) for t in columns]
        # With this scale, the dot product of two vectors has variance PAIRS_SHARE / len(PAIRS).
        scale = (PAIRS_SHARE / len(PAIRS) / LATENT_DIM) ** 0.25
        self._latent = [
            (pair, [scale * self._vectors(t, 2 * p + side) for side, t in enumerate(pair)])
            for p, pair in enumerate(PAIRS)
        ]
        self._mean, self._std = 0.0, 1.0
        pilot = self._score(*self._features(np.arange(PILOT_ROWS)))
        self._mean, self._std = pilot.mean(), pilot.std()

    def rows(self, numbers: np.ndarray) -> Block:
        """Generate the rows with the given row numbers (integers [n], >= 0)."""
        ints, values = self._features(numbers)
        score = (self._score(ints, values) - self._mean) / self._std
        probability = 1 / (1 + np.exp(-(LOGIT_MEAN + LOGIT_STD * score)))
        labels = hashing.uniform(self.seed, _LABEL, numbers) < probability
        return Block(labels.astype(np.int64), ints, values, probability)

    def probabilities(self, table: int) -> np.ndarray:
        """The probability of each value of a column: [missing, value 0, value 1, ...]."""
        count, missing = self.counts[table], self.missing[table]
        below = (1 - np.arange(1, count + 2) ** (1 - EXPONENT)) / (
            1 - (count + 1) ** (1 - EXPONENT)
        )
        return np.concatenate([[missing], (1 - missing) * np.diff(below)])

    def _features(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ints = np.empty((len(numbers), INTS), dtype=np.int64)
        for j in range(INTS):
            u, missing = self._present(_INTEGER + j, numbers, self._int_missing[j])
            drawn = np.floor(np.expm1(-self._int_scale[j] * np.log(u)))
            ints[:, j] = np.where(missing, -1, np.minimum(drawn, MAX_INT))
        values = np.empty((len(numbers), len(self.counts)), dtype=np.int64)
        for t in range(len(self.counts)):
            u, missing = self._present(_VALUE + t, numbers, self.missing[t])
            values[:, t] = np.where(missing, MISSING, self._values(t, u))
        return ints, values

    def _values(self, table: int, u: np.ndarray) -> np.ndarray:
        """Values of a column at the quantiles `u` in (0, 1)."""
        count = self.counts[table]
        largest = (count + 1) ** (1 - EXPONENT)
        drawn = np.floor((1 - u * (1 - largest)) ** (1 / (1 - EXPONENT))) - 1
        return np.minimum(drawn, count - 1)

    def _present(
        self, stream: int, numbers: np.ndarray, missing: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each row, return a uniform number in (0, 1), and whether the value is missing."""
        u = hashing.uniform(self.seed, stream, numbers)
        return np.where(u <= missing, 0.5, (u - missing) / (1 - missing)), u <= missing

    def _score(self, ints: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The teacher's logit up to an affine map: float64 [n]."""
        # Column by column, because in a matrix product, rounding may depend on the row's position.
        score = np.zeros(len(ints))
        for j in range(INTS):
            score += self._int_weight[j] / self._int_scale[j] * encode_ints(ints[:, j])
        for t in range(values.shape[1]):
            score += self._effect[t][values[:, t] + 1]  # index 0: a missing value
        for (left, right), (u, v) in self._latent:
            score += np.einsum("nd,nd->n", u[values[:, left] + 1], v[values[:, right] + 1])
        return score

    def _drawn(self, table: int, stream: int) -> np.ndarray:
        """One number per value of a column, "missing" first; mean 0 and variance 1 over rows."""
        share = self.probabilities(table)
        drawn = hashing.normal(self.seed, stream, np.arange(len(share)))
        drawn -= share @ drawn
        return drawn / np.sqrt(share @ drawn**2)

    def _vectors(self, table: int, place: int) -> np.ndarray:
        """One latent vector per value of a column, [values + 1, 4]; `place` selects the vectors."""
        first = _LATENT + LATENT_DIM * place
        return np.stack([self._drawn(table, first + k) for k in range(LATENT_DIM)], axis=1)


def _scaled(weights: np.ndarray, square: float) -> np.ndarray:
    """Scale `weights` so that the sum of their squares is `square`."""
    return weights * np.sqrt(square / np.sum(weights**2))
