"""A payload damaged in flight: who received it raises at the next step, all others one later.

None hangs, whatever the ranks do meanwhile.
"""

import contextlib

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import payload_layout
from dct_parallel import DCTState, dct_hook
from dct_parallel.exchange import all_gather as by_all_gather
from ranks import Dictated, assert_same, entry, gathered, run_ranks

SIZES = (20_000, 100, 30_000)
STARTS = 64
PLACES = {  # byte of the payload -> status
    "magic": (0, 1),
    "count": (24, 1),
    "starts": (STARTS + 7, 2),
    "position": (payload_layout(50_100, 3225, torch.bfloat16).positions, 4),
}
STEP = 4  # the one that is damaged


class Run:
    """A model in one bucket, or two; rank 1's payload of step 4 arrives damaged at the victims."""

    def __init__(self, rank, victims, byte=0, bucket_cap_mb=25, **options):
        self.rank = rank
        self.model = DistributedDataParallel(Dictated(SIZES), bucket_cap_mb=bucket_cap_mb)
        self.state = DCTState(self.model, density=0.05, **options)
        self.model.register_comm_hook(self.state, dct_hook)
        self.step = 0
        all_gather = by_all_gather.all_gather

        def in_flight(output, tensor, group):
            all_gather(output, tensor, group)
            if self.step == STEP and rank in victims:
                output[1, byte] ^= 0xFF

        by_all_gather.all_gather = in_flight

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

    def residuals(self):
        return [bucket.codec.residual.clone() for bucket in self.state._buckets.in_order()]

    def assert_tells(self, text):
        """Whoever asks the state from now on is told."""
        for ask in (self.state.stats, self.state.parameter_stats, self.state.state_dict):
            with pytest.raises(RuntimeError, match=text):
                ask()
        with pytest.raises(RuntimeError, match=text):
            self.state.close()
        self.state.close()  # it is


def _text(rank, victims, status=1):
    if rank in victims:
        got = f"status {status} from rank 1 in bucket 0"
        return f"every payload of step {STEP} must be intact, got {got}"
    return f"every payload up to step {STEP + 1} must be intact, got a damaged one on rank"


def _damaged(rank, byte, status, victims, bucket_cap_mb, look_early):
    run = Run(rank, victims, byte, bucket_cap_mb)
    while run.step <= STEP:
        run()
    residuals = run.residuals()
    assert len(residuals) == (1 if bucket_cap_mb > 1 else 2)
    text = _text(rank, victims, status)
    if rank in victims:
        if look_early:
            with pytest.raises(RuntimeError, match=text):
                run.state.stats()
        with pytest.raises(RuntimeError, match=text):
            run()
        for ours, before in zip(run.residuals(), residuals, strict=True):
            assert torch.equal(ours, before) and before.count_nonzero() > 15_000
    else:
        run()  # what comes from the victims is word of the damage
        with pytest.raises(RuntimeError, match=text):
            run()
    run.assert_tells(text)
    gathered(torch.ones(1))  # the ranks still answer each other


@pytest.mark.parametrize("place", PLACES)
def test_who_received_damage_raises_at_the_next_step_all_others_one_later(place):
    run_ranks(_damaged, 2, *PLACES[place], (0,), 25, False)


@pytest.mark.parametrize("victims", [(1,), (0, 2)], ids=["the sender alone", "two"])
def test_damage_among_four_ranks_in_two_buckets(victims):
    run_ranks(_damaged, 4, *PLACES["magic"], victims, 0.1, False)


def test_damage_that_is_noticed_between_steps_is_told_as_well():
    run_ranks(_damaged, 2, *PLACES["magic"], (0,), 0.1, True)


def test_all_raise_at_once_if_all_received_damage():
    run_ranks(_damaged, 2, *PLACES["starts"], (0, 1), 25, False)


def _last_step(rank, ask):
    run = Run(rank, (0,))
    while run.step <= STEP:
        run()
    if rank == 1:
        getattr(run.state, ask)()
        run.state.close()
    else:
        with pytest.raises(RuntimeError, match=_text(rank, (0,))):
            getattr(run.state, ask)()
        with contextlib.suppress(RuntimeError):
            run.state.close()
        with pytest.raises(RuntimeError, match=_text(rank, (0,))):
            run.state.state_dict()


@pytest.mark.parametrize("ask", ["close", "state_dict", "stats", "parameter_stats"])
def test_damage_of_the_last_step_is_not_lost(ask):
    run_ranks(_last_step, 2, ask)


def _accumulating(rank):
    """Two passes a step, the first of them not exchanged: it neither raises nor tells."""
    run = Run(rank, (0,))

    def step():
        run.model.zero_grad()
        with run.model.no_sync():
            run.model(*run.gradients(micro=1)).backward()
        run()

    for _ in range(STEP + 1):
        step()
    if rank == 1:
        step()
    with run.model.no_sync():
        run.model(*run.gradients(micro=1)).backward()
    with pytest.raises(RuntimeError, match=_text(rank, (0,))):
        run()


def test_damage_with_accumulation():
    run_ranks(_accumulating, 2)


def _skipped(rank, bad_step):
    """A GradScaler skips the damaged step, or the one in which the others are told."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    run = Run(rank, (0,), grad_scaler=scaler)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        grads = run.gradients()
        if run.step == bad_step and rank == bad_step - STEP:
            grads[0][7] = torch.inf
        try:
            scaler.scale(run.model(*grads)).backward()
        finally:
            run.step += 1
        scaler.step(optimizer)
        scaler.update()

    while run.step <= STEP + rank:  # rank 1 is told in one more
        step()
    assert (scaler.get_scale() == 8.0) == (run.step > bad_step)
    with pytest.raises(RuntimeError, match=_text(rank, (0,))):
        step()


@pytest.mark.parametrize("bad_step", [STEP, STEP + 1])
def test_damage_beside_a_step_that_a_scaler_skips(bad_step):
    run_ranks(_skipped, 2, bad_step)


def _joined(rank):
    """Rank 0 has no more batches when it receives damage; what it raises ends its join."""
    run = Run(rank, (0,))
    text = _text(rank, (0,))
    if rank == 0:
        shadowed = run.state._reduce

        def count(bucket):
            run.step = run.state.step
            return shadowed(bucket)

        run.state._reduce = count
        with pytest.raises(RuntimeError, match=text), run.model.join():
            run()
            run()
    else:
        with pytest.raises(RuntimeError, match=text), run.model.join():
            while run.step < 10:
                run()
                run.state.stats()
        assert run.step == STEP + 2


def test_damage_received_by_a_rank_that_has_joined():
    run_ranks(_joined, 2)


def _back_to_a_checkpoint(rank):
    run = Run(rank, (0,))
    while run.step <= STEP:
        if run.step == STEP - 1:
            saved = run.state.state_dict()
        run()
    if rank == 1:
        run()
    with pytest.raises(RuntimeError, match=_text(rank, (0,))):
        run()
    again = Run(rank, ())
    again.state.load_state_dict(saved)
    again.step = STEP - 1
    for _ in range(3):
        again()
    for parameter in again.model.module.p:
        assert_same(parameter.grad)
    assert entry(again.state.state_dict())["step"] == STEP + 2
    run.state.load_state_dict(saved)  # nor is the old state spoilt
    loaded, own = entry(run.state.state_dict()), entry(saved)
    for name, parameter in own["parameters"].items():
        assert torch.equal(loaded["parameters"][name]["residual"], parameter["residual"])
    return loaded["step"]


def test_a_checkpoint_is_the_way_back():
    assert run_ranks(_back_to_a_checkpoint, 2) == [STEP - 1, STEP - 1]
