"""The hook with accumulation, join, copies and torch.compile."""

import contextlib
import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from dct_parallel import DCTState, dct_hook
from support.ranks import (
    Dictated,
    assert_same,
    batch,
    ddp,
    entry,
    gathered,
    hooked,
    integers,
    mlp,
    on_ranks,
    owed,
    through_a_file,
    weights,
)

SIZES = (2000, 30, 5000)


def _residual(state, index):
    return entry(state.state_dict())["parameters"][f"p.{index}"]["residual"]


@pytest.mark.parametrize("no_sync, view", [(False, False), (True, False), (True, True)])
@on_ranks(2)
def test_accumulation_with_overflows_loses_no_finite_gradient(rank, no_sync, view):
    """A rank overflows in one of a step's two backward passes, so the scaler skips the step."""
    model = ddp(Dictated(SIZES), gradient_as_bucket_view=view)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"grad_scaler": scaler, "optimizer": optimizer, "start_step": 0}
    model, state = hooked(model, density=0.05, **options)
    total = [torch.zeros(n) for n in SIZES]
    for step in range(9):
        optimizer.zero_grad()
        for micro in range(2):
            grads = integers(SIZES, 10 * step + micro, rank)
            for expected, grad in zip(total, grads, strict=True):
                expected += grad
            if (step, micro) in ((5, 0), (6, 1)) and rank == 0:
                grads[1][3] = grads[2][17] = torch.inf
            with model.no_sync() if no_sync and micro == 0 else contextlib.nullcontext():
                scaler.scale(model(*grads)).backward()
        assert 0 <= state.stats()["overflow"] <= 1  # read before the scaler decides
        before = weights(model)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weights(model), before) == (step in (5, 6))
    assert state.step == (9 if no_sync else 18)
    for index, (expected, parameter) in enumerate(zip(total, model.module.p, strict=True)):
        left = _residual(state, index)
        dist.all_reduce(left)
        dist.all_reduce(expected)
        # Lost entries either overflowed or are a bucket's first entry, which reports the overflow.
        lost = (left - 2 * parameter.detach() != expected).nonzero().flatten().tolist()
        assert set(lost) <= [set(), {3}, {0, 17}][index], (index, lost)


class Squares(Dictated):
    """A model whose gradient p * x^2 depends on its weights."""

    def forward(self, x):
        return (self.p[0] * x).square().sum() / 2


@on_ranks(2)
def test_backward_with_create_graph(rank):
    """With create_graph, DDP supports one parameter and averages only first derivatives."""
    warnings.filterwarnings("ignore", "Using backward.. with create_graph")
    model, state = hooked(ddp(Squares([300])), density=0.05, start_step=1)
    parameter = model.module.p[0]
    parameter.data.copy_(torch.arange(300) % 3)
    applied, total = torch.zeros(300), torch.zeros(300)
    for step in range(6):
        parameter.grad = None
        x = integers(SIZES, step, rank)[0][:300].remainder(3)
        model(x).backward(create_graph=True)
        assert parameter.grad.requires_grad  # as without a hook
        applied += parameter.grad.detach()
        total += parameter.detach() * x.square()
    left = _residual(state, 0)
    dist.all_reduce(left)
    dist.all_reduce(total)
    assert torch.equal(2 * applied + left, total)
    assert left.count_nonzero() and applied.count_nonzero()


@pytest.mark.parametrize("format", ["bfloat16", "int4", "ternary"])
@on_ranks(2)
def test_sent_residual_of_an_unused_parameter_is_lost(rank, format):
    """DDP discards the mean of an unused parameter, so the sent part of its residual is lost."""
    model = DDP(Dictated((3000, 1500)), find_unused_parameters=True)
    model, state = hooked(model, format=format, density=0.2 if format == "bfloat16" else 1)
    generator, second = torch.Generator().manual_seed(rank), model.module.p[1]

    def step(used):
        model.zero_grad()
        parts = list(model.module.p)[: 1 + used]
        grads = [torch.randn(part.shape, generator=generator) for part in parts]
        model.module.forward = lambda: sum((p * g).sum() for p, g in zip(parts, grads, strict=True))
        before = _residual(state, 1)
        model().backward()
        return before, _residual(state, 1), grads[1] if used else torch.zeros(1500)

    for _ in range(5):
        step(used=True)
    before, after, _ = step(used=False)
    assert second.grad is None and before.count_nonzero() > 1000
    if format == "bfloat16":
        lost, passes = after != before, before.abs() >= before.abs()[after != before].min()
        assert torch.equal(lost, passes) and 20 < lost.sum() < 700
    else:
        assert after.norm() < {"int4": 0.2, "ternary": 0.8}[format] * before.norm()
    before, after, grad = step(used=rank == 0)  # nothing is lost if one rank uses p.1
    total = before + grad - after
    dist.all_reduce(total)
    torch.testing.assert_close(total, 2 * second.grad, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_take_back_before_anything_is_sent(rank):
    """take_back has no effect before compression, or between a load and the next step."""
    model, state = hooked(ddp(Dictated(SIZES)), density=0.05, start_step=1)
    state.take_back()
    model(*(torch.full((n,), torch.nan) for n in SIZES)).backward()
    state.take_back()
    assert not any(part.any() for part in owed(state.state_dict()).values())
    for step in range(3):
        model.zero_grad()
        model(*integers(SIZES, step, rank)).backward()
    saved = state.state_dict()
    state.load_state_dict(saved)
    state.take_back()
    after = owed(state.state_dict())
    assert all(torch.equal(part, after[name]) for name, part in owed(saved).items())
    assert any(part.any() for part in after.values())


@on_ranks(2)
def test_copied_state_has_only_the_settings(rank):
    """AveragedModel makes such copies. Calls on a copy raise. The original can still be trained."""
    scaler, model = torch.amp.GradScaler("cpu"), ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters())
    model, state = hooked(model, density=0.3, grad_scaler=scaler, optimizer=optimizer)
    scaler.scale(model(batch(0, rank)[0]).sum()).backward()
    text = r"must be made for its DDP \(write DCTState\(ddp, ...\) .*got a copy, which has only the"
    for copied in (copy.deepcopy(model), through_a_file(model, weights_only=False)):
        ((_, copied_state),) = copied._comm_hooks
        assert copied_state.settings == state.settings
        calls = [copied_state.state_dict, copied_state.stats, copied_state.plan]
        calls += [copied_state.take_back, copied_state.parameter_stats]
        for call in (*calls, lambda s=copied_state: s.load_state_dict(state.state_dict())):
            with pytest.raises(ValueError, match=text):
                call()
        copied_state.close()
        assert (copied_state.step, copied_state.node_group) == (0, None)
        hooked(ddp(copied.module), density=0.3)[0](batch(0, rank)[0]).sum().backward()
    scaler.scale(model(batch(0, rank)[0]).sum()).backward()
    assert state.step == 2


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
@on_ranks(2)
def test_checkpoint_loads_into_any_memory_format(rank, transport):
    """After loads into other memory formats, sent plus pending entries equal the gradient."""
    shape = (16, 32, 3, 3)
    grad = torch.arange(16 * 32 * 9).view(shape).sub(1000).float()
    formats = (torch.channels_last, torch.contiguous_format, torch.channels_last)
    sent, saved = torch.zeros(shape), None
    for step, memory_format in enumerate(formats):
        model = Dictated([shape])
        model.p[0] = nn.Parameter(torch.zeros(shape).to(memory_format=memory_format))
        model = DDP(model)
        state = DCTState(
            model, density=0.1, start_step=0, format=torch.float32, transport=transport
        )
        model.register_comm_hook(state, dct_hook)
        if saved is not None:
            state.load_state_dict(saved)
        model(grad * (step == 0)).backward()
        sent += model.module.p[0].grad
        saved = state.state_dict()
        pending = sum(gathered(owed(saved)["p.0"])) / 2
        assert torch.equal(sent + pending.view(shape), grad), step
    assert sent.count_nonzero() < sent.numel()


@on_ranks(1)
def test_parameter_names_do_not_include_wrappers(rank):
    """Checkpoints load into models with different wrappers."""
    plain = DCTState(DDP(mlp()), density=0.3)
    names = list(entry(plain.state_dict())["parameters"])
    layers = (0, 2, 4, 6, 8)
    assert names == [f"{n}.{part}" for n in layers for part in ("weight", "bias")]
    inner = mlp()
    inner[2] = checkpoint_wrapper(inner[2])
    inner[4] = torch.compile(inner[4], backend="eager")
    for module in (torch.compile(mlp(), backend="eager"), inner):
        state = DCTState(DDP(module), density=0.3)
        assert list(entry(state.state_dict())["parameters"]) == names
        state.load_state_dict(plain.state_dict())
    ignoring = mlp()
    DDP._set_params_and_buffers_to_ignore_for_model(
        compiled := torch.compile(ignoring, backend="eager"), ["_orig_mod.0.weight"]
    )
    state = DCTState(DDP(compiled), density=0.3)
    assert list(entry(state.state_dict())["parameters"]) == names[1:]


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x):
        return self.last(self.middle(self.first(x)) + self.frozen)


@pytest.mark.parametrize("ignored", [["first.weight"], ["last.weight"], ["middle.weight"], []])
@on_ranks(2)
def test_state_covers_the_parameters_that_ddp_averages(rank, ignored):
    """DDP selects its parameters once. It averages a tied weight even if one name is ignored."""
    gradients = []
    for compressed in (False, True):
        torch.manual_seed(1)
        module = _Tied()
        DDP._set_params_and_buffers_to_ignore_for_model(module, ignored)
        model = DDP(module, find_unused_parameters=True)
        module.frozen.requires_grad_(True)  # DDP does not average it
        module.middle.weight.requires_grad_(not ignored)  # DDP averages it unless it is ignored
        if compressed:
            hooked(model, density=1, format="float32", start_step=0)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        model(x).square().mean().backward()
        gradients.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    plain, exchanged = gradients
    assert plain.keys() == exchanged.keys() and "first.weight" in plain
    for name, gradient in plain.items():
        torch.testing.assert_close(exchanged[name], gradient)
        if name == "first.weight":
            assert_same(exchanged[name])


@on_ranks(1)
def test_unsupported_parameter_dtype_raises(rank):
    for dtype in (torch.float64, torch.complex64):
        last = nn.Linear(4, 4, dtype=dtype)
        model = DDP(nn.Sequential(nn.Linear(4, 4), last))
        text = f"dct::DCTState: parameter 1.weight must be float32, .*, got {str(dtype)[6:]}"
        with pytest.raises(TypeError, match=text):
            DCTState(model)
    model.module[1].requires_grad_(False)
    DCTState(DDP(model.module))  # frozen parameters are not exchanged


@on_ranks(1)
def test_dynamo_python_reducer_raises(rank):
    torch._dynamo.config.optimize_ddp = "python_reducer"
    model, _ = hooked(DDP(mlp()))
    with pytest.raises(TypeError, match=r"GradBucket, got tuple, as with .*'python_reducer'"):
        model(torch.ones(1, 64)).sum().backward()


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.use_reentrant = use_reentrant  # None: no checkpoints

    def forward(self, x):
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
@on_ranks(2)
def test_static_graph_and_reentrant_checkpoints_change_nothing(rank, transport):
    """In step 0 with static_graph, DDP calls hooks after backward. Reentrant passes are nested."""
    results = {}
    for static_graph, use_reentrant in itertools.product((False, True), (None, False, True)):
        model = DDP(_Checkpointed(use_reentrant), bucket_cap_mb=0.02, static_graph=static_graph)
        state = DCTState(model, density=0.1, transport=transport, start_step=0)
        model.register_comm_hook(state, dct_hook)
        for step in range(6):
            model.zero_grad()
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x.requires_grad_()).square().mean().backward()
        assert state.stats()["step"] == 6
        grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        state.close()
        # In the first step, DDP uses different buckets with static_graph than without it.
        assert grads.any() and torch.equal(grads, results.setdefault(static_graph, grads))
