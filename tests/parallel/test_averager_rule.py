"""Compares DCTAverager with a simulation of all ranks in numpy float64.

The simulation uses the averager's thresholds, which determine the entries that are sent. Its
changes are multiples of 3/256, so that sums and means over 2 or 3 ranks are exact.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from dct_parallel import DCTAverager
from dct_parallel.collectives import all_reduce_bytes
from dct_parallel.local_steps.weights import FlatWeights
from support.ranks import assert_same, entry, gathered, on_ranks, weights
from wire_meter import WireMeter

SIZES = (3000, 40, 3500)
BAD = 3  # the last rank has a NaN weight at this averaging


class _Simulation:
    def __init__(self, ranks, ahead):
        self.ahead = ahead
        self.weights, self.residual = np.zeros((2, ranks, sum(SIZES)))
        self.base = np.zeros(sum(SIZES))

    def average(self, thresholds):
        moved = self.weights - self._start()
        acc = self.residual + _finite(moved)
        if np.isfinite(moved).all():
            sent = np.where(abs(acc) >= thresholds, acc, 0)
            self.residual = acc - sent
            self.base = self.base + sent.mean(0)
        else:  # no rank averages, and finite changes stay pending
            self.residual = acc
        self.weights[:] = self._start()

    def _start(self):
        return self.base + self.residual if self.ahead else self.base


def _finite(x):
    return np.where(np.isfinite(x), x, 0)


def _saved(averager, key):
    parameters = entry(averager.state_dict())["parameters"]
    return torch.cat([parts[key] for parts in parameters.values()]).double().numpy()


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_weights_match_the_simulation(rank, ranks):
    cases = [(2, False), (2, True)] if ranks == 2 else [(1, False), (3, False)]
    for (period, bad), ahead in product(cases, (False, True)):
        _check_against_simulation(rank, ranks, period, bad, ahead)


def _check_against_simulation(rank, ranks, period, bad, ahead):
    model = nn.ParameterList(map(torch.zeros, SIZES))
    options = {"period": period, "format": torch.float32, "step_ahead": ahead}
    averager = DCTAverager(model, density=0.05, **options)
    rule, generator = _Simulation(ranks, ahead), np.random.default_rng(0)
    for step in range(1, 6 * period + 1):
        moves = generator.integers(-1024, 1025, rule.weights.shape) * 3 / 256
        rule.weights += moves
        breaks = bad and step == BAD * period
        with torch.no_grad():
            parts = torch.from_numpy(moves[rank]).float().split(SIZES)
            torch._foreach_add_(list(model), list(parts))
            if breaks:
                rule.weights[-1, 7] = np.nan
                model[0][7] = torch.nan if rank == ranks - 1 else model[0][7]
        if breaks:
            with pytest.raises(RuntimeError, match="finite on every rank"):
                averager.average_parameters()
        else:
            averager.average_parameters()
        if step % period == 0:
            rule.average(torch.cat(gathered(averager._bucket.codec.threshold))[:, None].numpy())
        assert np.array_equal(weights(model).numpy(), rule.weights[rank], equal_nan=True), step
        assert np.array_equal(_saved(averager, "residual"), rule.residual[rank]), step
        assert np.array_equal(_saved(averager, "base"), rule.base), step
    assert averager.stats()["overflow"] == 0
    assert np.count_nonzero(rule.base) > 1000 and np.count_nonzero(rule.residual) > 1000


@pytest.mark.parametrize("ahead", [False, True])
@on_ranks(2)
def test_flush_sends_all_changes_for_every_weight_dtype(rank, ahead):
    """The base contains all changes exactly. The weights are the base, rounded to their dtype."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    model = nn.ParameterList([torch.full((3000,), 256.0, dtype=dtype) for dtype in dtypes])
    options = {"format": torch.float32, "step_ahead": ahead}
    averager = DCTAverager(model, density=0.05, period=3, **options)
    generator = torch.Generator().manual_seed(rank)
    moved = torch.zeros(9000, dtype=torch.float64)
    for step in range(1, 15):
        before = weights(model).double()
        with torch.no_grad():
            for parameter in model:
                parameter += torch.randint(-8, 9, (3000,), generator=generator)
        moved += weights(model).double() - before
        averager.average_parameters()
        if step == 7:
            averager.flush()
            mean = 256 + sum(gathered(moved)) / 2
            assert np.array_equal(_saved(averager, "base"), mean)
    assert np.count_nonzero(_saved(averager, "residual")) > 1000
    with WireMeter() as meter:
        averager.flush()
        assert meter.take() == all_reduce_bytes(4 * 9000, 2)
    mean = 256 + sum(gathered(moved)) / 2
    assert np.array_equal(_saved(averager, "base"), mean)
    for parameter, part in zip(model, mean.split(3000), strict=True):
        assert torch.equal(parameter, part.to(parameter.dtype))


@on_ranks(3)
def test_flush_sends_the_residuals_of_senders_and_owners(rank):
    numel = 50_000
    model = nn.ParameterList([torch.zeros(numel)])
    options = {"format": "ternary", "transport": "reduce_scatter", "step_ahead": True}
    averager = DCTAverager(model, density=1, period=2, **options)
    generator = torch.Generator().manual_seed(rank)
    moved = torch.zeros(numel, dtype=torch.float64)
    for _ in range(9):
        move = torch.randn(numel, generator=generator)
        moved += move
        with torch.no_grad():
            model[0] += move
        averager.average_parameters()
    assert_same(averager._base)
    assert averager.plan().endswith("x fewer than the all-reduce in every step.")
    averager.flush()
    mean = sum(gathered(moved)) / 3
    torch.testing.assert_close(weights(model).double(), mean, rtol=0, atol=1e-5)
    for parts in entry(averager.state_dict())["parameters"].values():
        assert not any(part.any() for part in (parts["residual"], *parts["owner_residual"]))


@on_ranks(2)
def test_step_ahead_keeps_float16_weights_finite(rank):
    """step_ahead does not add a residual that would overflow. The residual is kept."""
    model = nn.ParameterList([torch.zeros(3000, dtype=torch.float16)])
    averager = DCTAverager(model, density=0.05, period=1, format="float32", step_ahead=True)
    averager._base[7] = model[0].data[7] = 60_000.0
    averager._bucket.codec.residual[7] = 6_000.0  # 66,000 overflows in float16
    with torch.no_grad():
        model[0][100:300] += 20_000.0  # 200 entries; the capacity is 188
    moved = weights(model)
    averager.average_parameters()
    assert torch.equal(weights(model), moved) and averager._bucket.codec.residual[7] == 6_000
    assert averager._base.count_nonzero() == 1 + 188
    with pytest.raises(RuntimeError, match="changes that overflow, in 0"):
        averager.average_parameters()  # sends the residual
    assert torch.equal(weights(model), moved)
    assert not averager._bucket.codec.residual[7]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 7e4, 0.0])
def test_all_representable_checks_every_position(value):
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
    sizes = [3, 0, 2, 4, 1]
    parameters = [nn.Parameter(torch.zeros(n, dtype=d)) for n, d in zip(sizes, dtypes, strict=True)]
    weights = FlatWeights("average_parameters", nn.ParameterList(parameters), None)
    owners = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])
    for position, owner in enumerate(owners.tolist()):
        flat = torch.ones(10)
        flat[position] = value
        assert weights.all_representable(flat) == bool(
            torch.tensor(value).to(dtypes[owner]).isfinite()
        )
