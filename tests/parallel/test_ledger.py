"""StepLedger without a network: bucket results, and when results are read."""

import contextlib
from functools import partial

import pytest
import torch

from dct_parallel.exchange.ledger import StepLedger
from dct_parallel.exchange.loss_scale import LossScale
from dct_parallel.exchange.results import ExchangeResult, RecentStats
from dct_parallel.exchange.settings import Settings
from support.ranks import on_ranks

FINE = ExchangeResult([], False, [1], 10, 0, 1)


class _Bucket:
    """A reduced bucket with a given result. The bucket is its own transport."""

    words = (torch.zeros(1, 2, dtype=torch.int32),)

    def __init__(self, result):
        self._result = result
        self.transport = self
        self.taken_back = 0

    def result(self, words):
        assert words == [[0, 0]]
        return self._result

    def take_back(self):
        self.taken_back += 1


def _ledger_and_skip():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    loss_scale = LossScale("op", scaler, [optimizer])
    loss_scale.watch([parameter])
    group, cpu = torch.distributed.group.WORLD, torch.device("cpu")
    ledger = StepLedger("op", group, cpu, Settings(0.1, "bfloat16"), {}, loss_scale)
    ledger.begin("test")

    def skip():
        parameter.grad = torch.tensor([torch.inf])
        scaler.step(optimizer)
        scaler.update()

    return ledger, skip


@pytest.mark.parametrize("damaged", [0, 1])
@on_ranks(1)
def test_corruption_is_reported_if_results_are_read_early(rank, damaged):
    """Results are read after each of two buckets, one of which is corrupted."""
    ledger, _ = _ledger_and_skip()
    result = FINE._replace(non_finite=True, damaged=["a hole from rank 3"])
    for number in range(2):
        ledger.sent[number] = _Bucket(result if number == damaged else FINE)
        with contextlib.suppress(RuntimeError):
            ledger.finish()
    assert ledger.non_finite
    for call in (ledger.finish, ledger.finish, ledger.end):
        with pytest.raises(RuntimeError, match=f"a hole from rank 3 in bucket {damaged}"):
            call()


@on_ranks(1)
def test_corruption_raises_at_the_end_of_the_next_backward_pass(rank):
    """If the end of the pass is not observed, the beginning of the next step raises."""
    for seen in (True, False):
        ledger, _ = _ledger_and_skip()
        ledger.sent[0] = _Bucket(FINE._replace(damaged=["a hole from rank 3"]))
        begin = partial(ledger.begin, "test")
        calls = [ledger.end, begin, ledger.end] if seen else [begin, begin]
        for call in calls[:-1]:
            call()
            ledger.sent[0] = _Bucket(FINE)
        with pytest.raises(RuntimeError, match="payload of step 0 must be intact, got a hole"):
            calls[-1]()


@on_ranks(1)
def test_skipped_step_is_taken_back_once(rank):
    ledger, skip = _ledger_and_skip()
    buckets = [_Bucket(FINE._replace(non_finite=True)), _Bucket(FINE)]
    for number, bucket in enumerate(buckets):
        ledger.sent[number] = bucket
        ledger.finish()
    assert [bucket.taken_back for bucket in buckets] == [0, 0]
    skip()
    for _ in range(2):
        ledger.finish()
        assert [bucket.taken_back for bucket in buckets] == [1, 1]


def test_step_without_payloads_is_not_in_the_statistics():
    """A rank sends no payload if its parts of all buckets are empty."""
    recent = RecentStats()
    recent.add([FINE._replace(counts=[0, 0], numel=0, payloads=0)])
    assert recent.density is None
    steps = [
        FINE._replace(counts=counts, numel=6, overflowed=1, payloads=4) for counts in ([1, 2], [3])
    ]
    recent.add(steps)
    assert (recent.density, recent.overflow) == (0.5, 0.25)
