"""Warnings about optimizers: second moments of sparse gradients, and steps that are skipped.

Each warning appears once, points to the user's line, and contains the line to write instead.
"""

import gc
import re
import weakref
from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks

from dct_parallel import DCTAverager, DCTState
from support.entry_points import Hook, LocalSteps, Sharded
from support.ranks import Dictated, hooked, warned

SIZES = (300, 20)
SPARSE, DENSE = {"density": 0.05, "start_step": 0}, {"density": 1, "format": "int4"}
POINTS = {
    "DCTState(ddp, ": Hook,
    "dct_fully_shard_hook(model, mesh=mesh, ": partial(Sharded, mesh=(1, 1)),
}
SECOND_MOMENTS = "DCT: AdamW divides by second moments"
SGD, AdamW = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.AdamW, lr=0.1)


def _scaler(**options):
    return torch.amp.GradScaler("cpu", init_scale=4.0, **options)


def _steps(point, *optimizers, scaler=None, compiled=False, bad=None, skip=None):
    """Train; return the texts of the warnings.

    The gradient of step `bad` is infinite. `skip` is called instead of the optimizers' steps.
    """
    watched = len(_global_optimizer_post_hooks)
    calls = [optimizer.step for optimizer in optimizers]
    if compiled:
        calls = [torch.compile(call, backend="aot_eager") for call in calls]
    with warned(__file__) as texts:
        for step in range(5):
            numbers = torch.linspace(step, 1, sum(SIZES))
            numbers[7] = torch.inf if step == bad else 1.0
            loss = point.loss(numbers)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if step == bad and skip is not None:
                skip()
                continue
            for optimizer, call in zip(optimizers, calls, strict=True):
                call() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
    assert len(_global_optimizer_post_hooks) == watched - 1
    return texts


@pytest.mark.parametrize("call", POINTS)
@pytest.mark.parametrize(
    "make, settings, warns",
    [
        *((AdamW, SPARSE, True), (torch.optim.RAdam, SPARSE, True)),
        *((torch.optim.Adamax, SPARSE, True), (torch.optim.RMSprop, SPARSE, True)),
        *((torch.optim.Adadelta, SPARSE, True), (torch.optim.Adafactor, SPARSE, True)),
        *((AdamW, {"density": 1, "format": name}, False) for name in ("int4", "bfloat16")),
        *((partial(SGD, momentum=0.9), SPARSE, True), (SGD, SPARSE, False)),
        *((torch.optim.Adagrad, SPARSE, False), (partial(SGD, momentum=0.9), DENSE, False)),
    ],
)
def test_optimizers_of_sparse_gradients_warn(one_rank, call, make, settings, warns):
    point = POINTS[call](SIZES, **settings)
    optimizer = make(point.parameters)
    texts = _steps(point, optimizer)
    assert len(texts) == warns
    assert len(point.state._optimizers._watched) == 1  # because versions are read in every step
    for text in texts:
        why = "applies momentum" if isinstance(optimizer, torch.optim.SGD) else "divides by second"
        assert text.startswith(f"DCT: {type(optimizer).__name__} {why}")
        assert text.endswith(f'write {call}format="int4").')


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    "density, tables, warns",
    [(0.005, torch.optim.Adagrad, 0), (0.001, torch.optim.Adagrad, 1), (0.005, AdamW, 1)],
)
def test_adam_with_adagrad_does_not_warn(one_rank, density, tables, warns, backwards):
    """The check is made when all optimizers have stepped, in either order."""
    point = Hook(SIZES, density=density)
    optimizers = tables(point.parameters[:1]), AdamW(point.parameters[1:])
    texts = _steps(point, *optimizers[:: -1 if backwards else 1])
    assert [text.partition(" of")[0] for text in texts] == warns * [SECOND_MOMENTS]


def test_hook_that_was_not_registered_warns_at_the_third_step(one_rank):
    model = DistributedDataParallel(Dictated(SIZES))
    state = DCTState(model, **SPARSE)
    optimizers = [SGD([parameter]) for parameter in model.parameters()]
    model(*map(torch.ones, SIZES)).backward()
    for step in range(5):
        with warned(__file__) as texts:
            for optimizer in optimizers:
                optimizer.step()
        assert ["no hook is registered" in text for text in texts] == [True] * (step == 2)
    state.close()


@pytest.mark.parametrize("period, interval", [(3, 2), (1, 3)])
def test_averager_that_is_not_called_warns_once(one_rank, period, interval):
    """After ten periods, or ten times the longest interval between two calls."""
    model = Dictated(SIZES)
    averager = DCTAverager(model, period=period)
    optimizers = [SGD([parameter]) for parameter in model.parameters()]
    model(*map(torch.ones, SIZES)).backward()
    limit = 10 * max(period, interval)
    for steps in (interval, interval, limit, 1, 2 * limit):
        with warned(__file__) as texts:
            for optimizer in optimizers * steps:
                optimizer.step()
        if steps == interval:
            averager.average_parameters()
        start = f"DCT: the last {limit + 1} steps of SGD changed weights that were not averaged"
        assert [text.partition(",")[0] for text in texts] == [start] * (steps == 1)


@pytest.mark.parametrize("make, warns", [(AdamW, 1), (partial(SGD, momentum=0.9), 0)])
def test_step_ahead_with_second_moments_warns_once(one_rank, make, warns):
    point = LocalSteps(SIZES, density=0.05, step_ahead=True)
    optimizer = make(point.model)
    sum(p.sum() for p in point.model).backward()
    with warned(__file__) as texts:
        for _ in range(3):
            optimizer.step()
    assert [text.endswith("write step_ahead=False.") for text in texts] == [True] * warns


NOT_PASSED = "SGD is stepped by a GradScaler that was not passed .* Write {}grad_scaler=scaler, opt"
LOST = "NaN or Inf in a step that no optimizer applied, .* write {}grad_scaler=scaler, optimizer=o"


SCALERS = [  # (scaler passed to the state, step that overflows, warning)
    *((None, 2, LOST), (None, 0, LOST), (None, None, None), ("other", 2, LOST), ("same", 2, None)),
    *(("unused", None, None), ("unused", 2, None)),
]
FUSED = [(None, None, NOT_PASSED), ("other", None, NOT_PASSED), ("same", 2, None)]


@pytest.mark.parametrize(
    "call, options, given, bad, expected",
    [
        *((call, {}, *case) for call in POINTS for case in SCALERS),
        *(("DCTState(ddp, ", {"fused": True}, *case) for case in FUSED),
    ],
)
def test_scaler_that_was_not_passed_warns(one_rank, call, options, given, bad, expected):
    """A fused optimizer warns in its first step. Others warn when the scaler skips a step."""
    scaler, settings = _scaler(), {"density": 1, "format": "int4", "start_step": 0, **options}
    if given is not None:
        settings["grad_scaler"] = scaler if given == "same" else _scaler()
    point = POINTS[call](SIZES, **settings)
    used = None if given == "unused" else scaler
    texts = _steps(point, point.optimizer, scaler=used, bad=bad)
    assert len(texts) == (expected is not None)
    for text in texts:
        assert re.search(expected.format(re.escape(call)), text)


@pytest.mark.parametrize("call", POINTS)
def test_step_that_the_user_skips_warns_unless_it_is_taken_back(one_rank, call):
    for taken_back in (False, True):
        point = POINTS[call](SIZES, **SPARSE)
        skip = point.state.take_back if taken_back else point.state.stats
        texts = _steps(point, point.optimizer, bad=2, skip=skip)
        assert len(texts) == (not taken_back)
        assert all(re.search(LOST.format(re.escape(call)), text) for text in texts)


@pytest.mark.parametrize("listed", [1, 2])
def test_optimizer_that_was_not_passed_warns(one_rank, listed):
    """An optimizer that was not passed warns if no passed optimizer holds its parameters."""
    scaler, point = _scaler(), Hook(SIZES, **SPARSE)
    point.state.close()
    optimizers = [SGD([parameter]) for parameter in point.parameters]
    options = {"grad_scaler": scaler, "optimizer": optimizers[:listed]}
    point.model = DistributedDataParallel(point.model.module)
    point.model, point.state = hooked(point.model, density=0.05, **options)
    texts = _steps(point, *optimizers, SGD(point.parameters[:1]), scaler=scaler)
    assert len(texts) == 2 - listed
    for text in texts:
        assert "SGD holds averaged parameters, but was not passed as optimizer: " in text
        line = "DCTState(ddp, grad_scaler=scaler, optimizer=[...]), with all optimizers of these"
        assert line in text


def test_check_with_a_compiled_step_and_without_gradients(one_rank):
    """The check runs outside compiled code, in the first step that has gradients."""
    point = Hook(SIZES, **SPARSE)
    optimizer = AdamW(point.parameters, foreach=True)
    optimizer.step()
    assert len(_steps(point, optimizer, compiled=True)) == 1


def test_check_with_an_optimizer_in_the_backward_pass(one_rank):
    point = Hook(SIZES, **SPARSE)
    optimizers = {p: AdamW([p]) for p in point.parameters}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    assert len(_steps(point)) == 1


def test_pending_check_holds_no_references(one_rank):
    """Weak references to parameters would break torch.utils.swap_tensors."""
    point = Hook(SIZES, **SPARSE)
    parameters, alive = point.parameters, weakref.ref(point.state._optimizers)
    assert not any(map(weakref.getweakrefs, parameters))
    del point
    gc.collect()
    assert alive() is None
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    AdamW(parameters).step()
