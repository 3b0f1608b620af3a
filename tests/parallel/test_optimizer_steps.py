"""Detection of steps that a GradScaler skips.

After training, every gradient must be in the weights (SGD, lr=1) or in a residual.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer

from dct_parallel import DCTAverager, DCTState, dct_fully_shard_hook
from dct_parallel.exchange.optimizers import LossScale
from support.entry_points import Hook, Sharded
from support.nodes import all_pending, rank_sum
from support.ranks import Dictated, ddp, hooked, integers, on_ranks, run_ranks, shard_mesh, weights

SIZES = (2000, 30)
STEPS, BAD = 8, 4
SGD = torch.optim.SGD


def _scaler(**options):
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0} | options)


def _numbers(step, rank, sizes=SIZES):
    return torch.cat(integers(sizes, step, rank))


def _assert_conserved(pending, applied, total):
    mean = rank_sum(total).double() / dist.get_world_size()
    torch.testing.assert_close(pending - applied.double(), mean, rtol=1e-5, atol=1e-4)


PROGRAMS = [  # (fused, step that overflows, scale set by the user, whether another pass follows)
    *((False, BAD, None, False), (True, BAD, None, False), (False, 0, None, False)),
    *((False, BAD, 2.0, False), (False, BAD, 1024.0, False)),
    *((False, BAD, None, True), (True, BAD, None, True)),
]


def _overflow_outside(rank, make, settings, programs):
    for fused, bad, new_scale, again in programs:
        scaler = _scaler()
        options = settings | ({"fused": True} if fused else {})
        point = make(SIZES, start_step=0, grad_scaler=scaler, **options)
        outside = torch.nn.Parameter(torch.zeros(()))
        point.optimizer.add_param_group({"params": [outside]})
        total = torch.zeros(sum(SIZES))
        for step in range(STEPS):
            point.optimizer.zero_grad()
            total += (numbers := _numbers(2 * step, rank))
            before = point.weights()
            loss = point.loss(numbers) + outside * (torch.inf if step == bad else 0)
            scaler.scale(loss).backward()
            scaler.step(point.optimizer)
            assert torch.equal(before, point.weights()) == (step == bad)
            if again:  # a pass whose gradients are dropped, as in a GAN
                total += (numbers := _numbers(2 * step + 1, rank))
                scaler.scale(point.loss(numbers)).backward()
                point.state.take_back()
            scaler.update(new_scale)
        assert scaler.get_scale() == (new_scale or 512)
        _assert_conserved(point.pending(), point.weights(), total)


@pytest.mark.parametrize(
    "make, settings, programs",
    [
        (Hook, {"density": 0.05}, PROGRAMS),
        (Hook, {"format": "int4", "density": 1}, PROGRAMS[:2]),
        (Sharded, {"density": 0.05, "mesh": (2, 1)}, PROGRAMS[::5]),
    ],
    ids=["5 %", "int4", "sharded"],
)
def test_overflow_outside_the_model_loses_nothing(make, settings, programs):
    """A parameter outside the model overflows, in the optimizer's first step or later."""
    run_ranks(_overflow_outside, 2, make, settings, programs)


@pytest.mark.parametrize("optimizers, in_turn", [(1, False), (1, True), (2, False)])
@on_ranks(2)
def test_two_models_with_one_scaler_lose_nothing(rank, optimizers, in_turn):
    """The first model overflows in two steps. The models share an optimizer, or each has one."""
    scaler, models = _scaler(), [ddp(Dictated(SIZES)) for _ in range(2)]
    held = [list(model.parameters()) for model in models]
    made = [SGD(group, lr=1.0) for group in ([held[0] + held[1]] if optimizers == 1 else held)]
    pairs = zip(models, (made * 2)[:2], strict=True)
    options = {"density": 0.05, "start_step": 0, "grad_scaler": scaler}
    states = [hooked(model, optimizer=each, **options)[1] for model, each in pairs]
    total, skipped = torch.zeros(2, sum(SIZES)), 0
    for step in range(STEPS + 2):
        for index in [step % 2] if in_turn else [0, 1]:
            total[index] += (numbers := _numbers(2 * step + index, rank))
            models[index].zero_grad()
            scaler.scale(models[index](*numbers.split(SIZES))).backward()
            if step in (0, BAD) and index == 0:
                held[0][0].grad[7] = torch.inf
            if optimizers == 2:
                scaler.step(made[index])
        before = scaler.get_scale()
        if optimizers == 1:
            scaler.step(made[0])
        scaler.update()
        skipped += scaler.get_scale() < before
        for each in made:
            each.zero_grad()
    assert skipped == 2
    for model, state, expected in zip(models, states, total, strict=True):
        _assert_conserved(all_pending(state.state_dict()), weights(model), expected)


@pytest.mark.parametrize("together", [False, True])
@on_ranks(2)
def test_scaler_must_skip_all_optimizers_of_a_model_or_none(rank, together):
    """If the scaler skips only one of two optimizers, the state raises and takes nothing back."""
    scaler, model = _scaler(), ddp(Dictated(SIZES))
    optimizers = [SGD([p], lr=1.0) for p in model.module.p]
    options = {"grad_scaler": scaler, "optimizer": optimizers}
    model, state = hooked(model, density=0.05, start_step=0, **options)
    total = torch.zeros(sum(SIZES))
    for step in range(3):
        model.zero_grad()
        total += (numbers := _numbers(step, rank))
        scaler.scale(model(*numbers.split(SIZES))).backward()
        for p in list(model.module.p)[: 1 + together] if step == 2 else ():
            p.grad[3] = torch.inf
        pending = all_pending(state.state_dict())  # before the scaler decides
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    if not together:
        text = "must have one optimizer, or .* got 2, of which it skipped 1; nothing was taken"
        with pytest.raises(RuntimeError, match=text):
            state.stats()
        assert torch.equal(all_pending(state.state_dict()), pending)
    else:
        _assert_conserved(all_pending(state.state_dict()), weights(model), total)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "calls, skipped",
    [
        *(("step update", True), ("step", True), ("unscale step update", True)),
        *(("unscale", None), ("unscale update", True), ("unscale alone update", False)),
        *(("", None), ("update", False)),  # gradients accumulate
        ("step begin update", False),  # the skip belongs to the earlier pass
        ("update step", False),  # the skip belongs to a pass of another state
    ],
)
def test_skipped_steps_are_detected(calls, skipped, fused):
    """`skipped` is expected for inf. For a finite gradient, only "unscale update" is a skip."""
    for grad in (torch.inf, 1.0):
        scaler, parameter = _scaler(), torch.nn.Parameter(torch.zeros(1))
        scaler.scale(torch.zeros(()))
        parameter.grad = torch.tensor([grad])
        optimizer = SGD([parameter], fused=fused)
        scale = LossScale("op", scaler, [optimizer], [parameter])
        scale.begin()
        steps = {
            "step": lambda scaler=scaler, optimizer=optimizer: scaler.step(optimizer),
            "unscale": lambda scaler=scaler, optimizer=optimizer: scaler.unscale_(optimizer),
            "alone": optimizer.step,
            "update": lambda scaler=scaler: scaler.update(2.0),
            "begin": scale.begin,
        }
        for call in calls.split():
            steps[call]()
        assert scale.skipped() is (bool(skipped) and (grad > 1 or calls == "unscale update"))
        assert not scale.skipped()  # each skip is reported once


@on_ranks(2)
def test_unsupported_optimizers_raise(rank):
    model, mesh, scaler = ddp(Dictated(SIZES)), shard_mesh(2, 1), _scaler()
    sharded = fully_shard(Dictated(SIZES), mesh=mesh["shard"])
    averager = DCTAverager(Dictated(SIZES))
    wrapper = PostLocalSGDOptimizer(SGD(model.parameters()), averager)
    missing = (
        r"optimizer must be given with an enabled grad_scaler, to see which steps the scaler skips "
        r"\(write grad_scaler=scaler, optimizer=optimizer\), got "
    )
    other = SGD([torch.nn.Parameter(torch.zeros(1))])
    hook = r"a torch.optim.Optimizer, or a list of them \(for a wrapper, pass the inner optimizer\)"
    for optimizer, error, text in [
        (None, ValueError, missing + "None"),
        ([], TypeError, f"optimizer must be {hook}, got an empty list"),
        (other, ValueError, "optimizer must have parameters that are averaged, got SGD of "),
        (wrapper, TypeError, f"optimizer must be {hook}, got PostLocalSGDOptimizer"),
        ([other, 3], TypeError, f"optimizer must be {hook}, got 3"),
    ]:
        options = {"grad_scaler": scaler, "optimizer": optimizer}
        with pytest.raises(error, match=f"^dct::DCTState: {text}"):
            DCTState(model, **options)
        with pytest.raises(error, match=f"^dct::dct_fully_shard_hook: {text}"):
            dct_fully_shard_hook(sharded, mesh=mesh, **options)
    DCTState(model, grad_scaler=_scaler(enabled=False))
    dct_fully_shard_hook(sharded, mesh=mesh, grad_scaler=None)
