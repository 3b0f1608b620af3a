"""DCTAverager against its rule, simulated for all ranks at once in float64 by numpy.

Which entries are sent follows from the thresholds, which are taken from the averager. All numbers
have few bits, and are multiples of 3 for the mean of 3 ranks: equal means equal.
"""

import numpy as np
import pytest
import torch
from torch import nn

from dct_parallel import DCTAverager
from ranks import entry, gathered, run_ranks, weights

SIZES = (3000, 40, 3500)
BAD = 3  # the averaging at which a weight of the last rank is NaN


class _Rule:
    def __init__(self, ranks, decay):
        self.decay = decay
        self.weights, self.residual = np.zeros((2, ranks, sum(SIZES)))
        self.base = np.zeros(sum(SIZES))

    def average(self, thresholds):
        moved = self.weights - self.base
        finite = np.isfinite(moved)
        acc = self.decay * self.residual + np.where(finite, moved, 0)
        if not finite.all():
            # As if it had not happened: what was not sent decays once, as before the next one.
            self.residual = acc / self.decay
        else:
            sent = np.where(abs(acc) >= thresholds, acc, 0)
            self.residual = acc - sent
            self.base = self.base + sent.mean(0)
        self.weights[:] = self.base


def _saved(averager, key):
    parameters = entry(averager.state_dict())["parameters"]
    return torch.cat([parts[key] for parts in parameters.values()]).double().numpy()


def _follows_the_rule(rank, ranks, period, decay, bad):
    model = nn.ParameterList(map(torch.zeros, SIZES))
    averager = DCTAverager(model, 0.05, period, value_dtype=torch.float32, residual_decay=decay)
    rule, generator = _Rule(ranks, decay), np.random.default_rng(0)
    for step in range(1, 6 * period + 1):
        moves = generator.integers(-1024, 1025, rule.weights.shape) * 3 / 256
        rule.weights += moves
        with torch.no_grad():
            parts = torch.from_numpy(moves[rank]).float().split(SIZES)
            torch._foreach_add_(list(model), list(parts))
            if bad and step == BAD * period:
                rule.weights[-1, 7] = np.nan
                model[0][7] = torch.nan if rank == ranks - 1 else model[0][7]
        if bad and step == BAD * period:
            with pytest.raises(RuntimeError, match="finite on every rank"):
                averager.average_parameters()
        else:
            averager.average_parameters()
        if step % period == 0:
            rule.average(torch.cat(gathered(averager._bucket.codec.threshold))[:, None].numpy())
        assert np.array_equal(weights(model).numpy(), rule.weights[rank]), step
        assert np.array_equal(_saved(averager, "residual"), decay * rule.residual[rank]), step
        assert np.array_equal(_saved(averager, "base"), rule.base), step
    assert averager.stats()["overflow"] == 0
    assert np.count_nonzero(rule.base) > 1000 and np.count_nonzero(rule.residual) > 1000


@pytest.mark.parametrize(
    ("ranks", "period", "decay", "bad"),
    [(2, 2, 1.0, False), (3, 1, 0.5, False), (2, 2, 0.5, True)],
)
def test_it_follows_the_rule(ranks, period, decay, bad):
    run_ranks(_follows_the_rule, ranks, ranks, period, decay, bad)
