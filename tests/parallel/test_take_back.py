"""A step that the training loop skips: `take_back` makes that of it what a GradScaler's skip is."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from dct_parallel import DCTState
from ranks import Dictated, ddp, hooked, on_ranks, owed, weights

SIZES = (2000, 30, 5000, 20_000)  # the last one is longer than a block: "shard" has two owners
BAD_STEP = 6


def _gradients(step, rank):
    """Small integers, so that all sums below are exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-60, 61, (n,), generator=generator).float() for n in SIZES]


def _make(**kwargs):
    model = ddp(Dictated(SIZES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kwargs = {"start_step": 0, "optimizer": optimizer, **kwargs}
    return *hooked(model, density=0.05, **kwargs), optimizer


def _guarded_step(model, state, optimizer, grads):
    """One step of a loop that skips what is not finite; whether it did."""
    optimizer.zero_grad()
    model(*grads).backward()
    norm = clip_grad_norm_(model.parameters(), torch.inf)
    if not norm.isfinite():
        state.take_back()
        return True
    optimizer.step()
    return False


@on_ranks(2)
def test_it_does_what_a_scaler_does_and_both_do_it_once(rank):
    """Bit for bit, with a scale of 1; and both at once take back once."""
    ends = []
    for by_scaler, by_user in ((True, False), (False, True), (True, True)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, backoff_factor=0.5)
        if not by_scaler:
            scaler = torch.amp.GradScaler("cpu", enabled=False)
        model, state, optimizer = _make(grad_scaler=scaler)
        for step in range(12):
            grads = _gradients(step, rank)
            if step == BAD_STEP and rank == 0:
                grads[2][17] = torch.inf
            optimizer.zero_grad()
            scaler.scale(model(*grads)).backward()
            scaler.unscale_(optimizer)
            finite = clip_grad_norm_(model.parameters(), torch.inf).isfinite()
            if by_user and not finite:
                state.take_back()
            if by_scaler or finite:
                scaler.step(optimizer)
            scaler.update()
        ends.append([weights(model), *owed(state.state_dict()).values()])
    for other in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ends[0], other, strict=True))


@on_ranks(2)
def test_where_nothing_was_sent_nothing_comes_back(rank):
    """Before compression, and between a load and the next step, there is nothing to take back."""
    model, state, optimizer = _make(start_step=1)
    with pytest.raises(ValueError, match="dct::take_back: state must be bound to its DDP"):
        DCTState(density=0.05).take_back()
    state.take_back()
    assert _guarded_step(model, state, optimizer, [torch.full((n,), torch.nan) for n in SIZES])
    assert not any(part.any() for part in owed(state.state_dict()).values())
    for step in range(3):
        _guarded_step(model, state, optimizer, _gradients(step, rank))
    saved = state.state_dict()
    state.load_state_dict(saved)
    state.take_back()
    after = owed(state.state_dict())
    assert all(torch.equal(part, after[name]) for name, part in owed(saved).items())
    assert any(part.any() for part in after.values())
