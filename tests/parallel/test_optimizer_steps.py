"""What counts as a step that a GradScaler skipped: what its optimizers did, not what a DDP saw."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dct_parallel import DCTState, dct_fully_shard_hook, dct_hook
from dct_parallel.exchange.loss_scale import OptimizerSteps
from ranks import Dictated, ddp, entry, integers, on_ranks

SIZES = (2000, 30)
STEPS, BAD = 8, 5
SGD = torch.optim.SGD


def _hooked(scaler, **settings):
    model = ddp(Dictated(SIZES))
    state = DCTState(model, grad_scaler=scaler, start_step=0, **settings)
    model.register_comm_hook(state, dct_hook)
    return model, state


def _owed_and_applied(model, state):
    """Means over ranks of what is in the weights, under SGD with rate 1, and in residuals."""
    saved = entry(state.state_dict())["parameters"]
    found = []
    for index, parameter in enumerate(model.module.p):
        owed = saved[f"p.{index}"]["residual"].double()
        dist.all_reduce(owed)
        found.append(owed / dist.get_world_size() - parameter.detach().double())
    return torch.cat(found)


def _mean(step):
    """Of the ranks' gradients, flat."""
    ranks = dist.get_world_size()
    return sum(torch.cat(integers(SIZES, step, r)).double() for r in range(ranks)) / ranks


FORMATS = [{"density": 0.05}, {"format": "int4"}]
SPARSE_OR_NOT = pytest.mark.parametrize("settings", FORMATS, ids=["5 %", "int4"])


@SPARSE_OR_NOT
@on_ranks(2)
def test_an_overflow_outside_of_the_ddp_loses_nothing(rank, settings):
    """One optimizer also holds a parameter that the DDP does not, whose gradient overflows.

    It may never have stepped, and the user may set the scale after each step.
    """
    for fused, bad, new_scale in (
        *((False, BAD, None), (True, BAD, None), (False, 0, None)),
        *((False, BAD, 2.0), (False, BAD, 1024.0)),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model, state = _hooked(scaler, **settings)
        outside = torch.nn.Parameter(torch.zeros(1))
        optimizer = SGD([*model.parameters(), outside], lr=1.0, fused=fused)
        total = torch.zeros(sum(SIZES), dtype=torch.float64)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(*integers(SIZES, step, rank)) + outside.sum() * (
                torch.inf if step == bad else 0
            )
            before = model.module.p[0].detach().clone()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(new_scale)
            assert torch.equal(before, model.module.p[0]) == (step == bad)
            total += _mean(step)
        assert scaler.get_scale() == (new_scale or 512)
        torch.testing.assert_close(_owed_and_applied(model, state), total, rtol=1e-5, atol=1e-4)


@SPARSE_OR_NOT
@pytest.mark.parametrize("optimizers", [1, 2])
@on_ranks(2)
def test_two_models_and_one_scaler(rank, settings, optimizers):
    """As in a GAN: only the second overflows, in its first step and later. With two optimizers
    only that one is skipped; with one, both are."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    pairs = [_hooked(scaler, **settings) for _ in range(2)]
    held = [list(model.parameters()) for model, _ in pairs]
    groups = [held[0] + held[1]] if optimizers == 1 else held
    own = [SGD(group, lr=1.0) for group in groups]
    total = torch.zeros(2, sum(SIZES), dtype=torch.float64)
    for step in range(STEPS):
        for index, (model, _) in enumerate(pairs):
            grads = integers(SIZES, 2 * step + index, rank)
            total[index] += _mean(2 * step + index)
            if index == 1 and step in (0, BAD) and rank == 0:
                grads[0][7] = torch.inf
            before = [model.module.p[0].detach().clone() for model, _ in pairs]
            model.zero_grad()
            scaler.scale(model(*grads)).backward()
            if optimizers == 2:
                scaler.step(own[index])
        if optimizers == 1:
            scaler.step(own[0])
        scaler.update()
        assert torch.equal(before[1], pairs[1][0].module.p[0]) == (step in (0, BAD))
    assert scaler.get_scale() == 2.0**18
    for index, (model, state) in enumerate(pairs):
        got = _owed_and_applied(model, state)
        near = (got - total[index]).abs() < 1e-3
        lost = near.logical_not().nonzero().flatten().tolist()
        # With the entry that overflowed, in few bits those of its scale, in the bucket's order.
        reach = {7} if "density" in settings else {*range(64), *range(SIZES[0], sum(SIZES))}
        assert set(lost) <= (reach if index == 1 else set()), lost


@on_ranks(2)
def test_fully_shard_and_a_parameter_outside(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Dictated(SIZES), mesh=mesh["shard"])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = dct_fully_shard_hook(model, mesh=mesh, density=0.05, grad_scaler=scaler, start_step=0)
    outside = torch.nn.Parameter(torch.zeros(1))
    optimizer, other = SGD(model.parameters(), lr=1.0), SGD([outside], lr=1.0)
    optimizer.add_param_group({"params": [extra := torch.nn.Parameter(torch.zeros(()))]})
    total = torch.zeros(sum(SIZES), dtype=torch.float64)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*integers(SIZES, step, rank))
        loss = loss + outside.sum() * (torch.inf if step == 3 else 0)
        loss = loss + extra * (torch.inf if step == BAD else 0)
        other.zero_grad()
        scaler.scale(loss).backward()
        for each in (optimizer, other):
            scaler.step(each)
        scaler.update()
        total += _mean(step)
    state.stats()  # looks at the last step
    owed = torch.cat([s.residual for b in state._buckets for s in b.states().values()]).double()
    dist.all_reduce(owed)
    weights = torch.cat([p.full_tensor().detach().double() for p in model.parameters()])
    torch.testing.assert_close(owed / 2 - weights, total, rtol=1e-5, atol=1e-4)


def _steps(*parameters):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    return scaler, OptimizerSteps("op", scaler, parameters)


def _parameter(grad):
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([grad])
    return parameter


def test_an_optimizer_that_is_left_out_of_a_round_was_not_skipped():
    """Gradients accumulate for it, while the scaler skips another."""
    ours, other = _parameter(1.0), _parameter(torch.inf)
    scaler, steps = _steps(ours)
    optimizer, second = SGD([ours]), SGD([other])
    steps.begin()
    scaler.step(second)
    scaler.update()
    assert not steps.skipped()
    steps.begin()
    ours.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert steps.skipped() and not steps.skipped()


def test_what_was_decided_before_a_pass_is_not_of_that_pass():
    """A GAN's generator goes backward through the discriminator, which was skipped before."""
    ours = _parameter(torch.inf)
    scaler, steps = _steps(ours)
    optimizer = SGD([ours])
    steps.begin()
    scaler.step(optimizer)
    assert not steps.skipped()  # before the update it is not decided
    steps.begin()
    scaler.update()
    assert not steps.skipped()


@pytest.mark.parametrize("finite", [True, False])
def test_unscaled_gradients_count_as_skipped_where_nobody_stepped(finite):
    ours = _parameter(1.0 if finite else torch.inf)
    scaler, steps = _steps(ours)
    optimizer = SGD([ours])
    steps.begin()
    scaler.unscale_(optimizer)
    if finite:
        optimizer.step()  # without the scaler
    scaler.update()
    assert steps.skipped() is not finite


def test_optimizers_of_one_model_that_part_are_an_error():
    parameters = _parameter(1.0), _parameter(torch.inf)
    scaler, steps = _steps(*parameters)
    optimizers = [SGD([parameter]) for parameter in parameters]
    steps.begin()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    text = r"dct::op: parameters must have one optimizer, or .* got 2, of which it skipped 1: call"
    with pytest.raises(RuntimeError, match=text):
        steps.skipped()
    assert not steps.skipped()


class _Wrapper:
    """An optimizer that torch's hooks do not see."""

    def __init__(self, parameter):
        self.param_groups = [{"params": [parameter]}]
        self.steps = 0

    def step(self):
        self.steps += 1


@pytest.mark.parametrize("grad", [1.0, torch.inf])
def test_an_optimizer_that_is_none_of_torchs(grad):
    ours, other = _parameter(grad), _parameter(1.0)
    scaler, steps = _steps(ours)
    wrapper, second = _Wrapper(ours), SGD([other])
    steps.begin()
    scaler.step(wrapper)
    scaler.update()
    assert steps.skipped() is (wrapper.steps == 0)
    # Beside another, its overflow cannot be told from that one's.
    steps.begin()
    for optimizer in (wrapper, second):
        scaler.step(optimizer)
    scaler.update()
    if grad == 1.0:
        assert not steps.skipped()
    else:
        with pytest.raises(
            RuntimeError, match=r"grad_scaler must step .* got _Wrapper, .*: call take_back"
        ):
            steps.skipped()


def test_an_optimizer_that_is_gone():
    ours = _parameter(torch.inf)
    scaler, steps = _steps(ours)
    steps.begin()
    scaler.step(SGD([ours]))
    scaler.update()
    with pytest.raises(RuntimeError, match=r"got one that is gone, so that it cannot be told"):
        steps.skipped()


def test_what_watches_goes_with_its_owner():
    from torch.optim import optimizer as module

    hooks = module._global_optimizer_post_hooks
    before = set(hooks)  # some of these may go meanwhile, as garbage of tests before
    _, steps = _steps(_parameter(1.0))
    (ours,) = hooks.keys() - before
    del steps
    assert ours not in hooks
