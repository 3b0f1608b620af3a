"""The ledger of a step without a network: what buckets say of it, and when they are asked."""

import contextlib

import pytest
import torch

from dct_parallel.exchange.ledger import StepLedger
from dct_parallel.exchange.loss_scale import LossScale
from dct_parallel.exchange.results import ExchangeResult, RecentStats
from dct_parallel.exchange.settings import Settings
from ranks import on_ranks

FINE = ExchangeResult([], False, [1], 10, 0, 1)


class _Bucket:
    """One that is reduced by now, and says so."""

    def __init__(self, result):
        self.result = result
        self.taken_back = 0

    def take_result(self):
        result, self.result = self.result, None
        return result

    def take_back(self):
        self.taken_back += 1


def _begun():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    group = torch.distributed.group.WORLD
    settings = Settings(0.1, "bfloat16")
    cpu = torch.device("cpu")
    loss_scale = LossScale("op", scaler)
    loss_scale.watch([parameter])
    ledger = StepLedger("op", group, cpu, settings, {}, loss_scale)
    ledger.begin()

    def skip():
        parameter.grad = torch.tensor([torch.inf])
        scaler.step(optimizer)
        scaler.update()

    return ledger, skip


@on_ranks(1)
def test_what_a_step_says_before_its_end_is_not_forgotten(rank):
    """Somebody asks for statistics between two buckets: the second does not take it back."""
    ledger, _ = _begun()
    result = FINE._replace(non_finite=True, damaged=["a hole from rank 3"])
    for number, bucket in enumerate([_Bucket(result), _Bucket(FINE)]):
        ledger.reduction(number, bucket)
        with contextlib.suppress(RuntimeError):
            ledger.finish()
    assert ledger.non_finite
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a hole from rank 3 in bucket 0"):
            ledger.finish()


@on_ranks(1)
def test_a_skipped_step_is_taken_back_once(rank):
    ledger, skip = _begun()
    buckets = [_Bucket(FINE._replace(non_finite=True)), _Bucket(FINE)]
    for number, bucket in enumerate(buckets):
        ledger.reduction(number, bucket)
        ledger.finish()
    assert [bucket.taken_back for bucket in buckets] == [0, 0]
    skip()
    for _ in range(2):
        ledger.finish()
        assert [bucket.taken_back for bucket in buckets] == [1, 1]


def test_a_step_without_payloads_is_not_in_the_statistics():
    """As on a rank whose parts of all buckets are empty."""
    recent = RecentStats()
    recent.note([FINE._replace(counts=[0, 0], numel=0, payloads=0)])
    assert recent.density is None
    steps = [
        FINE._replace(counts=counts, numel=6, overflowed=1, payloads=4) for counts in ([1, 2], [3])
    ]
    recent.note(steps)
    assert (recent.density, recent.overflow) == (0.5, 0.25)
