"""When results are read, what they raise, and that reading changes no figure."""

from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from dct_parallel import compress_fully_shard, dct_fully_shard_hook
from dct_parallel.exchange.ledger import StepLedger
from dct_parallel.exchange.results import ExchangeResult, HostCopy, RecentStats
from support.ranks import ddp, hooked, mlp, on_ranks, shard_mesh, train

FINE = ExchangeResult([], False, [1], 10, 0, 1)
DAMAGED = FINE._replace(non_finite=True, damaged=["a hole from rank 3"])


class _Exchange:
    def __init__(self, result):
        self._result = result
        self.words = () if result is None else (torch.zeros(1, 2, dtype=torch.int32),)
        self.taken_back = 0

    def result(self, words):
        assert words == [[0, 0]]
        return self._result

    def take_back(self):
        self.taken_back += 1


def _raises(text, *calls):
    for call in calls:
        with pytest.raises(RuntimeError, match=text):
            call()


@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_is_reported_if_results_are_read_early(damaged):
    """Results are read after each of two exchanges, one of which is damaged."""
    ledger = StepLedger("op")
    ledger.begin()
    for number in range(2):
        ledger.record(f"bucket {number}", _Exchange(DAMAGED if number == damaged else FINE))
        if number < damaged:
            ledger.finish()
    calls = ledger.read, ledger.finish, ledger.end, ledger.begin, ledger.require_intact
    _raises(f"payload of step 0 must be intact, got a hole from rank 3 in bucket {damaged}", *calls)
    assert ledger.non_finite


@pytest.mark.parametrize("end_is_seen", [True, False])
@pytest.mark.parametrize("result", [DAMAGED, None])
def test_damage_and_failures_raise_at_the_end_of_the_next_step(end_is_seen, result):
    """If the end of a step is not observed, the beginning of the next one raises."""
    ledger = StepLedger("op", unit="averaging")
    ledger.begin(7)
    ledger.record("bucket 0", _Exchange(result))
    calls = [ledger.end, ledger.begin, ledger.end] if end_is_seen else [ledger.begin]
    for call in calls[:-1]:
        call()
        if call == ledger.begin:
            ledger.record("bucket 0", _Exchange(FINE))
    what = "a failed exchange" if result is None else "a hole from rank 3"
    _raises(f"every payload of averaging 7 must be intact, got {what} in bucket 0", calls[-1])


def test_step_is_taken_back_once():
    ledger, exchanges = StepLedger("op"), [_Exchange(FINE) for _ in range(3)]
    for number, exchange in enumerate(exchanges):
        if number != 1:
            ledger.begin()
        ledger.record(f"bucket {number}", exchange)
        ledger.finish()
    for _ in range(2):
        ledger.take_back()
        assert [exchange.taken_back for exchange in exchanges] == [0, 0, 1]


def test_step_without_payloads_is_not_in_the_statistics():
    """A rank sends no payload if its parts of all buckets are empty."""
    recent = RecentStats()
    recent.add(0, [FINE._replace(counts=[0, 0], numel=0, payloads=0)])
    assert recent.density is None
    steps = [
        FINE._replace(counts=counts, numel=6, overflowed=1, payloads=4) for counts in ([1, 2], [3])
    ]
    recent.add(1, steps)
    assert (recent.density, recent.overflow) == (0.5, 0.25)


def test_host_copy_waits_for_the_device_of_its_tensor(monkeypatch):
    """The current device of a process may be a different one."""
    event, device = Mock(), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(torch, "empty_like", MagicMock())
    HostCopy(Mock(is_cuda=True, device=device)).tolist()
    event.record.assert_called_once_with(device)


def _made(shape):
    """A model with the mesh `shape`, or with DDP, and its state."""
    if shape is None:
        return hooked(ddp(mlp()), density=0.05, start_step=0)
    model, mesh = mlp(), shard_mesh(*shape)
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh["shard"])
    if shape == (1, 2):
        return model, compress_fully_shard(model)
    return model, dct_fully_shard_hook(model, mesh=mesh, density=0.05, start_step=0)


@pytest.mark.parametrize("shape", [None, (2, 1), (1, 2)])
@on_ranks(2)
def test_reading_inside_a_backward_pass_changes_no_figure(rank, shape):
    found = []
    for reads in (False, True):
        model, state = _made(shape)
        names = ("stats", "parameter_stats", "plan", "state_dict") if reads else ()
        readers = [getattr(state, name) for name in names if hasattr(state, name)]

        def read(*_, readers=readers):
            for reader in readers:
                reader()

        getattr(model, "module", model)[4].register_full_backward_hook(read)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(3))
        found.append(state.stats())
    assert found[0] == found[1] and found[0]["step"] == 3
