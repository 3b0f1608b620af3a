"""If a payload is corrupted in flight, the receiver raises in each call that reads results.

Results are read at the end of the next backward pass, and by `stats` and other methods.
Other ranks are not notified. They fail when the receiver exits, or when their group times out.
"""

import functools

import pytest
import torch
import torch.distributed as dist

from dct_kernels import payload_layout
from dct_parallel import collectives
from dct_parallel.exchange import reduce_scatter as by_reduce_scatter
from dct_parallel.exchange import transport as by_all_gather
from dct_parallel.local_steps import averager
from support.entry_points import Hook, LocalSteps, NodeMesh, Sharded
from support.nodes import rank_sum
from support.ranks import corrupting, on_ranks, run_ranks, set_timeout, shorten_timeouts

SIZES = (20_000, 100, 30_000)
NUMEL = 50_100
STARTS = 64
PLACES = {  # {name: (offset of the corrupted byte, expected status)}
    "magic": (0, 1),
    "version": (4, 1),
    "flags": (7, 1),
    "numel": (8, 1),
    "count": (24, 1),
    "starts": (STARTS + 7, 2),
    "position": (payload_layout(50_100, 3225, torch.bfloat16).positions, 4),
}
PHASES = ("gather", "to the owner", "of the owner")  # the last two belong to reduce_scatter
STEP = 4  # payloads of this step are corrupted
GONE = r"(?i)timed? ?out|closed by peer|reset by peer"


class Network:
    """Patches collectives so that `victims` receive a corrupted payload from the last rank."""

    def __init__(self, victims):
        set_timeout(20)  # limits the wait if a receiver does not raise
        self.bad = False  # whether payloads are corrupted now
        self._is_victim = dist.get_rank() in victims
        self._original = dist.all_to_all_single

    def corrupt(self, phase, byte=0):
        """Corrupt payloads in one of the PHASES."""
        gather, scatter = collectives.all_gather, self._original
        if phase == "to the owner":
            scatter = self._corrupting(scatter, byte)
        else:
            gather = self._corrupting(gather, byte)
        by_all_gather.all_gather = by_reduce_scatter.all_gather = gather
        dist.all_to_all_single = scatter

    def _corrupting(self, collective, byte):
        def change(output):
            if self.bad and self._is_victim:
                output[-1, byte] ^= 0xFF

        return corrupting(collective, change)


def _numbers(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(NUMEL, generator=generator)


def _train_with_corruption(network, phase, byte=0, make=Hook, **settings):
    """Return an entry point after the corrupted step."""
    transport = "all_gather" if phase == "gather" else "reduce_scatter"
    network.corrupt(phase, byte)
    point = make(SIZES, density=0.05, transport=transport, **settings)
    for step in range(STEP + 1):
        network.bad = step == STEP
        point.step(_numbers(step))
    network.bad = False
    return point


def _text(sender, status=1, phase="gather"):
    where = ", of the mean" if phase == "of the owner" else ""
    got = f"got status {status} from rank {sender}{where} in bucket 0(; status 1 .* in bucket 1)?"
    rule = f"every payload of step {STEP} must be intact, {got}"
    return f"^dct::(DCTState|dct_fully_shard_hook): {rule}: load a checkpoint into a new state$"


def _raises(text, *calls):
    for call in calls:
        with pytest.raises(RuntimeError, match=text):
            call()


def _raises_in_all_calls(point, text):
    state = point.state
    calls = [state.stats, state.parameter_stats, state.state_dict, state.plan, state.take_back]
    if not isinstance(point, Sharded):  # FSDP2's forward pass is collective
        calls.append(lambda: point.step(_numbers(STEP + 1)))
    _raises(text, *calls, lambda: state.load_state_dict({}), state.close, state.close)


@on_ranks(2)
def test_corruption_anywhere_raises_and_adds_nothing(rank):
    network = Network(victims=[0])
    for phase in PHASES:
        for place in PLACES if phase == "gather" else ("magic", "starts"):
            byte, status = PLACES[place]
            point = _train_with_corruption(network, phase, byte)
            buckets = point.state._buckets.in_order()
            residuals = [bucket.codec.residual.clone() for bucket in buckets]
            if rank == 0:
                _raises_in_all_calls(point, _text(1, status, phase))
                for bucket, before in zip(buckets, residuals, strict=True):
                    assert torch.equal(bucket.codec.residual, before)
                    assert before.count_nonzero() > 15_000, place


TWO_BUCKETS = functools.partial(Hook, bucket_cap_mb=0.1)
FIRST_CALLS = ["stats", "state_dict", "parameter_stats", "take_back", "close"]


def _each_call_raises(rank, make, victims, senders, phases):
    network = Network(victims)
    for phase in phases:
        for call in FIRST_CALLS if (make, phase) == (TWO_BUCKETS, "gather") else FIRST_CALLS[:1]:
            point = _train_with_corruption(network, phase, make=make)
            if rank in victims:
                _raises(_text(senders[rank], 1, phase), getattr(point.state, call))
                _raises_in_all_calls(point, _text(senders[rank], 1, phase))
            else:  # other ranks are not notified
                assert point.state.stats()["step"] == STEP + 1
    point = _train_with_corruption(network, "gather", make=make)
    if rank in victims:
        _raises(_text(senders[rank]), lambda: point.step(_numbers(STEP + 1)))
        return
    shorten_timeouts(2)  # first, because the victim joins no exchange after this step
    _raises(GONE, lambda: [point.step(_numbers(step)) for step in (STEP + 1, STEP + 2)])


@pytest.mark.parametrize(
    "make, victims, senders, phases",
    [
        (TWO_BUCKETS, [1, 2], [3, 3, 3, 3], PHASES[:1]),
        (Hook, [3], [3, 3, 3, 3], PHASES[:1]),  # the sender is the only victim
        (NodeMesh, [0, 3], [2, 3, 2, 3], PHASES),
        (Sharded, [1], [2, 3, 2, 3], PHASES),
    ],
    ids=["hook", "own payload", "nodes", "shards"],
)
def test_receiver_raises_in_its_first_call_and_in_later_ones(make, victims, senders, phases):
    run_ranks(_each_call_raises, 4, make, victims, senders, phases)


@on_ranks(2)
def test_corruption_in_a_skipped_step(rank):
    scaler, network = torch.amp.GradScaler("cpu", init_scale=16.0), Network(victims=[0])
    network.corrupt("gather")
    point = Hook(SIZES, density=0.05, grad_scaler=scaler)
    for step in range(STEP + 1):
        numbers, network.bad = _numbers(step), step == STEP
        if step == STEP and rank == 0:
            numbers[7] = torch.inf
        scaler.scale(point.loss(numbers)).backward()
        scaler.step(point.optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0
    if rank == 0:
        _raises_in_all_calls(point, _text(1))


@on_ranks(2)
def test_corruption_received_by_a_joined_rank(rank):
    """Rank 0 receives the payload after its last batch. Rank 0 raises and leaves `join`."""
    network = Network(victims=[0])
    network.corrupt("gather")
    point = Hook(SIZES, density=0.05)
    reduce = point.state._reduce

    def counted(bucket):
        network.bad = point.state.step == STEP
        return reduce(bucket)

    point.state._reduce = counted
    if rank == 0:
        with pytest.raises(RuntimeError, match=_text(1)[1:-1]), point.model.join():
            for step in range(2):
                point.step(_numbers(step))
    else:
        step = 0
        with pytest.raises(RuntimeError, match=GONE), point.model.join():
            for step in range(10):
                if step == STEP + 2:
                    shorten_timeouts(1)
                point.step(_numbers(step))
        assert step == STEP + 2


def _timed_out(*arguments):
    raise RuntimeError("as at the timeout")


@on_ranks(2)
def test_local_steps_are_kept_if_averaging_fails(rank):
    """Rank 0 raises, so no rank applies the averaging. All changes stay pending."""
    network = Network(victims=[0])
    averaging = f"dct::DCTAverager: every payload of averaging {STEP + 1} must be intact, got"
    for phase, ahead in (("gather", False), ("gather", True), ("to the owner", False)):
        network.corrupt(phase)
        transport = "all_gather" if phase == "gather" else "reduce_scatter"
        settings = {"density": 0.05, "transport": transport, "step_ahead": ahead}
        point, moved = LocalSteps(SIZES, **settings), 0
        for step in range(STEP + 2):
            numbers = torch.randint(-8, 9, (NUMEL,), generator=torch.manual_seed(9 * step + rank))
            numbers, moved = numbers / 8, moved + numbers / 8
            base = point.state._base.clone()
            network.bad = step == STEP
            if step < STEP:
                point.step(numbers)
                continue
            text = f"{averaging} status 1 from rank 1" if rank == 0 else "as at the timeout"
            with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match=text):
                if rank == 1:  # rank 0 does not call the collective, so rank 1 would time out
                    patch.setattr(averager, "any_rank", _timed_out)
                point.step(numbers)
            break
        network.bad = False
        assert torch.equal(point.state._base, base)
        assert torch.equal(point.weights(), base + ahead * point.state._bucket.codec.residual)
        if rank == 0:
            state = point.state
            calls = [state.average_parameters, state.flush, state.state_dict, state.stats]
            _raises(text, *calls, state.plan, lambda state=state: state.load_state_dict({}))
        pending = torch.zeros(NUMEL, dtype=torch.float64)
        point.state._bucket.add_pending(pending)
        assert torch.equal(rank_sum(moved.double() - pending), 2 * base.double())
