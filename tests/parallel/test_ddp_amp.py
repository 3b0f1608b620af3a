"""The hook with a GradScaler: unscaled residuals, and steps that the scaler skips."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from support.ranks import (
    Dictated,
    assert_same,
    batch,
    ddp,
    entry,
    hooked,
    integers,
    mlp,
    on_ranks,
    weights,
)

SIZES = (2000, 30, 5000)
NAMES = {f"p.{index}": index for index in range(len(SIZES))}


def _residuals(state):
    return {name: s["residual"] for name, s in entry(state.state_dict())["parameters"].items()}


@pytest.mark.parametrize("bad_micro", [0, 1])
@pytest.mark.parametrize("no_sync", [False, True])
@on_ranks(2)
def test_accumulation_with_an_overflow_loses_no_finite_gradient(rank, no_sync, bad_micro):
    """One rank overflows in one of the step's two backward passes, so the step is skipped."""
    model = ddp(Dictated(SIZES))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"grad_scaler": scaler, "optimizer": optimizer, "start_step": 0}
    model, state = hooked(model, density=0.05, **options)
    total = [torch.zeros(n) for n in SIZES]
    skipped = 0
    for step in range(9):
        optimizer.zero_grad()
        for micro in range(2):
            grads = integers(SIZES, 10 * step + micro, rank)
            for expected, grad in zip(total, grads, strict=True):
                expected += grad
            if (step, micro) in ((5, bad_micro), (6, bad_micro)) and rank == 0:
                grads[1][3] = grads[2][17] = torch.inf
            with model.no_sync() if no_sync and micro == 0 else contextlib.nullcontext():
                scaler.scale(model(*grads)).backward()
        assert 0 <= state.stats()["overflow"] <= 1  # read before the scaler decides
        before, scale = weights(model), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            assert torch.equal(weights(model), before)
    for expected, (name, index) in zip(total, NAMES.items(), strict=True):
        left = _residuals(state)[name]
        dist.all_reduce(left)
        dist.all_reduce(expected)
        kept = left - 2 * model.module.p[index].detach() == expected
        # Lost entries either overflowed or are a bucket's first entry, which reports the overflow.
        lost = kept.logical_not().nonzero().flatten().tolist()
        assert set(lost) <= [set(), {3}, {0, 17}][index], (name, lost)
    assert skipped == 2


@on_ranks(2)
def test_float16_autocast_trains_through_overflowing_first_steps(rank):
    """The first loss scales overflow float16, so the first steps are skipped."""
    model = ddp(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"grad_scaler": scaler, "optimizer": optimizer, "start_step": 0}
    model, state = hooked(model, density=0.1, **options)
    losses, skipped = [], 0
    for step in range(60):
        x, y = batch(step % 4, rank)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x) - y).square().mean()
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        losses.append(loss.item())
    assert skipped >= 3
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert_same(weights(model))
    assert weights(model).isfinite().all()
    for residual in _residuals(state).values():
        assert residual.isfinite().all()
        assert residual.abs().max() < 10  # residuals are not multiplied by the loss scale
