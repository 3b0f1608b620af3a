"""A payload damaged in flight: who received it raises, from the next step on and in every call.

It tells nobody. The other ranks end as if it were gone, at the group's timeout at the latest.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_kernels import payload_layout
from dct_parallel import DCTState, collectives, dct_hook
from dct_parallel.exchange import all_gather as by_all_gather
from dct_parallel.exchange import reduce_scatter as by_reduce_scatter
from ranks import Dictated, assert_same, entry, on_ranks, set_timeout

SIZES = (20_000, 100, 30_000)
STARTS = 64
PLACES = {  # byte of the payload -> status
    "magic": (0, 1),
    "version": (4, 1),
    "flags": (7, 1),
    "numel": (8, 1),
    "count": (24, 1),
    "starts": (STARTS + 7, 2),
    "position": (payload_layout(50_100, 3225, torch.bfloat16).positions, 4),
}
STEP = 4  # the one that is damaged
GONE = r"(?i)timed? ?out|closed by peer|reset by peer"


class Run:
    """A model in one bucket, or two; rank 1's payload of step 4 arrives damaged at the victims."""

    def __init__(self, rank, victims, byte=0, bucket_cap_mb=25, **options):
        set_timeout(4)
        self.rank, self.victims, self.byte = rank, victims, byte
        self.model = DDP(Dictated(SIZES), bucket_cap_mb=bucket_cap_mb)
        self.state = DCTState(self.model, density=0.05, **options)
        self.model.register_comm_hook(self.state, dct_hook)
        self.step = 0
        for transport in (by_all_gather, by_reduce_scatter):
            transport.all_gather = self._damaging(transport.all_gather)

    def _damaging(self, all_gather):
        def in_flight(output, tensor, group):
            all_gather(output, tensor, group)
            self.damage(output)

        return in_flight

    def damage(self, received):
        if self.step == STEP and self.rank in self.victims:
            received[1, self.byte] ^= 0xFF

    def gradients(self, micro=0):
        seed = 100 * micro + 10 * self.step + self.rank
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(n, generator=generator) for n in SIZES]

    def __call__(self):
        """A step; the next one's number counts from its end, or from its error."""
        self.model.zero_grad()
        try:
            self.model(*self.gradients()).backward()
        finally:
            self.step += 1

    def to_the_damage(self):
        while self.step <= STEP:
            self()

    def residuals(self):
        return [bucket.codec.residual.clone() for bucket in self.state._buckets.in_order()]

    def ends(self, status=1, where=""):
        """A victim raises in this step and whatever it is asked; the others are left alone."""
        if self.rank not in self.victims:
            with pytest.raises(RuntimeError, match=GONE):
                self()
            return
        got = f"got status {status} from rank 1{where} in bucket 0(; status 1 .* in bucket 1)?"
        text = f"^dct::DCTState: every payload of step {STEP} must be intact, {got}: load a "
        text += "checkpoint into a new state$"
        with pytest.raises(RuntimeError, match=text):
            self()
        state = self.state
        calls = state.stats, state.parameter_stats, state.state_dict, state.plan, state.take_back
        for call in (*calls, lambda: state.load_state_dict({}), state.close, state.close):
            with pytest.raises(RuntimeError, match=text):
                call()


@pytest.mark.parametrize(
    "ranks, place, victims, bucket_cap_mb, look_early",
    [
        *((2, place, (0,), 25, False) for place in PLACES),
        (4, "magic", (1,), 0.1, False),  # the sender alone
        (4, "magic", (0, 2), 0.1, False),
        (2, "magic", (0,), 0.1, True),  # noticed between steps
        (2, "starts", (0, 1), 25, False),  # all
    ],
)
@on_ranks("ranks")
def test_who_received_damage_raises(rank, place, victims, bucket_cap_mb, look_early):
    byte, status = PLACES[place]
    run = Run(rank, victims, byte, bucket_cap_mb)
    run.to_the_damage()
    residuals = run.residuals()
    assert len(residuals) == (1 if bucket_cap_mb > 1 else 2)
    if look_early and rank in victims:
        with pytest.raises(RuntimeError, match=f"got status {status} from rank 1 in bucket 0"):
            run.state.stats()
    run.ends(status)
    if rank in victims:
        for ours, before in zip(run.residuals(), residuals, strict=True):
            assert torch.equal(ours, before) and before.count_nonzero() > 15_000


@pytest.mark.parametrize("phase", ["to the owner", "of the owner"])
@pytest.mark.parametrize("place", ["magic", "starts"])
@on_ranks(2)
def test_the_sender_is_named_in_both_phases_of_a_reduce_scatter(rank, phase, place):
    """An owner's sum lacks rank 1's payload, or rank 1's sum arrives damaged."""
    byte, status = PLACES[place]
    run = Run(rank, (0,), byte, transport="reduce_scatter")
    if phase == "to the owner":
        by_reduce_scatter.all_gather = collectives.all_gather
        all_to_all = dist.all_to_all_single

        def in_flight(received, *args, **kwargs):
            work = all_to_all(received, *args, **kwargs)
            run.damage(received)
            return work

        dist.all_to_all_single = in_flight
    run.to_the_damage()
    run.ends(status, "" if phase == "to the owner" else ", of the mean")


@pytest.mark.parametrize("ask", ["close", "state_dict", "stats", "parameter_stats", "take_back"])
@on_ranks(2)
def test_damage_of_the_last_step_is_not_lost(rank, ask):
    run = Run(rank, (0,))
    run.to_the_damage()
    if rank == 1:
        getattr(run.state, ask)()
        run.state.close()
    else:
        for call in (getattr(run.state, ask), run.state.close, run.state.state_dict):
            with pytest.raises(RuntimeError, match=r"step 4 must be intact, .* from rank 1"):
                call()


@on_ranks(2)
def test_damage_with_accumulation(rank):
    """Two passes a step, the first of them not exchanged: it does not raise."""
    run = Run(rank, (0,))

    def first_pass():
        run.model.zero_grad()
        with run.model.no_sync():
            run.model(*run.gradients(micro=1)).backward()

    while run.step <= STEP:
        first_pass()
        run()
    first_pass()
    run.ends()


@on_ranks(2)
def test_damage_beside_a_step_that_a_scaler_skips(rank):
    """A GradScaler skips the damaged step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    run = Run(rank, (0,), grad_scaler=scaler)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    while run.step <= STEP:
        optimizer.zero_grad()
        grads = run.gradients()
        if run.step == STEP and rank == 0:
            grads[0][7] = torch.inf
        scaler.scale(run.model(*grads)).backward()
        run.step += 1
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0
    run.ends()


@on_ranks(2)
def test_damage_received_by_a_rank_that_has_joined(rank):
    """Rank 0 has no more batches when it receives damage; what it raises ends its join."""
    run = Run(rank, (0,))
    if rank == 0:
        shadowed = run.state._reduce

        def count(bucket):
            run.step = run.state.step
            return shadowed(bucket)

        run.state._reduce = count
        text = f"every payload of step {STEP} must be intact, got status 1 from rank 1"
        with pytest.raises(RuntimeError, match=text), run.model.join():
            run()
            run()
    else:
        with pytest.raises(RuntimeError, match=GONE), run.model.join():
            while run.step < 10:
                run()
        assert run.step == STEP + 2


@on_ranks(2)
def test_a_checkpoint_in_a_new_state_is_the_way_back(rank):
    run = Run(rank, (0,))
    while run.step <= STEP:
        if run.step == STEP - 1:
            saved = run.state.state_dict()
        run()
    if rank == 0:
        run.ends()
    again = Run(rank, ())
    again.state.load_state_dict(saved)
    again.step = STEP - 1
    for _ in range(3):
        again()
    for parameter in again.model.module.p:
        assert_same(parameter.grad)
    assert entry(again.state.state_dict())["step"] == STEP + 2
