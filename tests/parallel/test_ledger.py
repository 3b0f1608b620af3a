"""The ledger of a step without a network: what buckets say of it, and when they are asked."""

import contextlib

import pytest
import torch

from dct_parallel.exchange.ledger import StepLedger
from dct_parallel.exchange.loss_scale import LossScale
from dct_parallel.exchange.recent_stats import RecentStats
from dct_parallel.exchange.results import ExchangeResult, Traffic, Verdict

DAMAGED, TOLD = Verdict(damaged=["a hole"]), Verdict(told=[3])


class _Guard:
    def begin_step(self, step):
        pass

    def carry_out(self, collectives):
        return collectives()


class _Bucket:
    """One that is reduced by now, and says so."""

    def __init__(self, verdict):
        self.result = ExchangeResult(verdict, Traffic([1], 10, 0, 1))
        self.taken_back = 0

    def take_result(self):
        result, self.result = self.result, None
        return result

    def take_back(self):
        self.taken_back += 1


@pytest.mark.parametrize("first", [DAMAGED, TOLD], ids=["damaged", "told"])
def test_what_a_step_says_before_its_end_is_part_of_its_verdict(first):
    """Somebody asks for statistics between two buckets: the second does not take it back."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    ledger = StepLedger("op", _Guard(), LossScale("op", scaler))
    ledger.begin()
    buckets = [_Bucket(first._replace(non_finite=True)), _Bucket(Verdict())]
    announced = []
    for number, bucket in enumerate(buckets):
        ledger.reduction(number, bucket, torch.zeros(10))
        with contextlib.suppress(RuntimeError):
            ledger.finish()
    assert ledger.verdict.non_finite and (ledger.verdict.damaged or ledger.verdict.told)
    with pytest.raises(RuntimeError, match=r"a hole in bucket 0|rank 3"):
        ledger.finish(lambda: announced.append(1))
    assert len(announced) == bool(first.damaged)  # else all know


def test_a_skipped_step_is_taken_back_whenever_its_overflow_was_seen():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    ledger = StepLedger("op", _Guard(), LossScale("op", scaler))
    ledger.begin()
    buckets = [_Bucket(Verdict(non_finite=True)), _Bucket(Verdict())]
    for number, bucket in enumerate(buckets):
        ledger.reduction(number, bucket, torch.zeros(10))
        ledger.finish()
    assert [bucket.taken_back for bucket in buckets] == [0, 0]
    scaler._scale.mul_(0.5)  # as the scaler's update does
    for _ in range(2):
        ledger.finish()
        assert [bucket.taken_back for bucket in buckets] == [1, 1]


def test_a_step_without_payloads_is_not_in_the_statistics():
    """As on a rank whose parts of all buckets are empty."""
    recent = RecentStats()
    recent.note([Traffic(counts=[0, 0], numel=0, overflowed=0, payloads=0)])
    assert recent.density is None
    recent.note([Traffic([1, 2], 6, 1, 4), Traffic([3], 6, 1, 4)])
    assert (recent.density, recent.overflow) == (0.5, 0.25)
