"""The generator of rows.

The generator yields the rows of the published results. A row depends only on seed and number. The
best possible score is known.
"""

import numpy as np
import pytest

from dlrm.data import synthetic

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
