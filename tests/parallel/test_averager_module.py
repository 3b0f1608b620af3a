"""DCTAverager: modules, settings, statistics, and weights that are loaded between averagings."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

from dct_parallel import DCTAverager
from support.ranks import (
    assert_same,
    batch,
    entry,
    gathered,
    mlp,
    on_ranks,
    owed,
    train_step,
    warned,
    weights,
)


def uneven(rank=0):
    """Return an MLP with `rank` added to its initial weights."""
    model = mlp(32, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    return model


def train(model, optimizer, averager, rank, steps):
    for step in steps:
        train_step(model, optimizer, *batch(step, rank, 32))
        averager.average_parameters()


@pytest.mark.parametrize(
    "module, arguments, error, text",
    [
        (nn.Linear(2, 2), {"period": 2**31}, ValueError, r"period must be in \[1, 2147483647\]"),
        (nn.Linear(2, 2), {"step_ahead": 1}, TypeError, "step_ahead must be a bool"),
        (nn.Linear(2, 2).double(), {}, TypeError, "parameter weight must be float32, .* float64"),
        (nn.ReLU(), {}, ValueError, "module must have parameters that require grad"),
        (nn.Linear(2, 2, device="meta"), {}, ValueError, "module must be on one device"),
    ],
)
def test_invalid_arguments(one_rank, module, arguments, error, text):
    with pytest.raises(error, match=f"dct::DCTAverager: {text}"):
        DCTAverager(module, **arguments)


def test_strided_parameter_is_averaged(one_rank):
    model = nn.ParameterList([nn.Parameter(torch.arange(7.0)[::2])])
    averager = DCTAverager(model, density=1, period=1, format=torch.float32)
    averager.average_parameters()
    assert model[0].tolist() == [0.0, 2.0, 4.0, 6.0]


def test_ddp_module_raises(one_rank):
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    for module in (model, nn.Sequential(nn.ReLU(), model)):
        text = "module must be trained without DistributedDataParallel, which averages all .*got "
        with pytest.raises(TypeError, match=text + type(module).__name__):
            DCTAverager(module)


def test_default_format_is_ternary_if_dense_and_bfloat16_if_sparse(one_rank):
    chosen = [DCTAverager(nn.Linear(2, 2), **given)._settings for given in ({}, {"density": 0.1})]
    assert [settings.format for settings in chosen] == ["ternary", "bfloat16"]


def test_copying_or_pickling_raises(one_rank):
    module = nn.Linear(3, 3)
    module.averager = DCTAverager(module)
    for make in (copy.deepcopy, copy.copy, pickle.dumps, torch.optim.swa_utils.AveragedModel):
        text = r"an averager must not be copied or pickled \(save its state_dict\(\)\)"
        with pytest.raises(TypeError, match=f"dct::DCTAverager: {text}"):
            make(module.averager if make is copy.copy else module)


class _Mixed(nn.Module):
    """Frozen parameters of several dtypes and layouts between two trained ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(300))
        frozen = [torch.randn(40, 3), torch.randn(4, 5).t(), torch.randn(()), torch.randn(0)]
        frozen += [torch.randn(7).bfloat16(), torch.randn(7).double(), torch.randn(50) > 0]
        frozen += [torch.randint(-99, 99, (5, 5), dtype=torch.int8), torch.randint(99, (3,))]
        frozen += [torch.randn(4, dtype=torch.complex64)]
        self.frozen = nn.ParameterList(nn.Parameter(value, False) for value in frozen)
        self.last = nn.Parameter(torch.randn(30, 20))
        self.register_buffer("buffer", torch.randn(3))


@on_ranks(2)
def test_constructor_broadcasts_all_parameters_from_rank_0(rank):
    torch.manual_seed(rank)
    model = _Mixed()
    strides = [p.stride() for p in model.parameters()]
    buffer = model.buffer.clone()
    DCTAverager(model)
    assert [p.stride() for p in model.parameters()] == strides
    assert torch.equal(model.buffer, buffer)
    torch.manual_seed(0)
    expected = dict(_Mixed().named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        assert parameter.requires_grad == (name in ("first", "last"))
    assert len(expected) == 12


@on_ranks(2)
def test_different_periods_and_frozen_parameters_raise(rank):
    model = uneven()
    text = "period must be the same on every rank, got 2 on rank 0, 3 on rank 1"
    with pytest.raises(ValueError, match=text):
        DCTAverager(model, period=2 + rank)
    model[0].bias.requires_grad_(rank == 0)
    with pytest.raises(ValueError, match="model must be the same on every rank, got 6 parameters"):
        DCTAverager(model)
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30 + rank, 3))
    model[1].requires_grad_(False)
    with pytest.raises(ValueError, match="frozen must be the same on every rank, got 2 parameters"):
        DCTAverager(model)


@on_ranks(2)
def test_changed_parameters_raise(rank):
    """Averaging raises until the parameters are restored."""
    model = uneven(rank)
    model[0].bias.requires_grad_(False)
    averager = DCTAverager(model, density=0.3, period=2)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optimizer, averager, rank, [0, 1, 2])
    train_step(model, optimizer, *batch(3, rank, 32))

    def raises(names):
        before = weights(model)
        text = "module must have the same parameters that require grad as when .*, got a diff"
        with pytest.raises(ValueError, match=rf"{text}erence in {names}: make a new averager"):
            averager.average_parameters()
        assert torch.equal(weights(model), before) and averager.step == 3

    for parameter, name in ((model[0].bias, r"0\.bias"), (model[0].weight, r"0\.weight")):
        trained = parameter.requires_grad
        parameter.requires_grad_(not trained)
        raises(name)
        parameter.requires_grad_(trained)
    model.added = nn.Linear(2, 2)
    raises(r"added\.bias, added\.weight")
    del model.added
    weight = model[0].weight
    model[0].weight = nn.Parameter(weight.detach().clone())
    raises(r"0\.weight")
    model[0].weight = weight
    averager.average_parameters()
    assert averager.step == 4
    assert_same(weights(model))


@on_ranks(2)
def test_averaged_gradients_warn_once(rank):
    """There is no warning if gradients differ between ranks, or if a rank has no gradients."""
    for equal, sync, missing in [
        *((False, True, False), (True, False, False)),  # equal because of DDP, or of equal data
        *((False, False, False), (True, False, True)),
    ]:
        model = nn.parallel.DistributedDataParallel(uneven())
        averager = DCTAverager(model.module, period=1)
        x, _ = batch(0, 0 if equal else rank, 32)
        with contextlib.nullcontext() if sync else model.no_sync():
            model(x).sum().backward()
        if missing and rank:
            model.zero_grad()
        with warned(__file__) as texts:
            for _ in range(2):
                averager.average_parameters()
        if (equal or sync) and not missing:
            (text,) = texts
            assert text.startswith("DCT: gradients are the same on all ranks, so every rank reads")
            assert text.endswith("train the module itself, or under ddp.no_sync().")
        else:
            assert not texts


@on_ranks(2)
def test_stats_and_plan_report_density_and_bytes(rank):
    model = nn.Linear(1000, 100, bias=False)
    averager = DCTAverager(model, density=0.1, period=10)
    nothing_yet = {"step": 0, "density": None, "overflow": None, "unaveraged": 0}
    assert averager.stats() == nothing_yet | {"wire_bytes": averager.wire_bytes}
    for _ in range(20):
        with torch.no_grad():
            model.weight += torch.randn(100, 1000)
        averager.average_parameters()
    stats = averager.stats()
    assert stats["step"] == 20 and 0.05 < stats["density"] < 0.126
    plan = averager.plan()
    assert "all_gather (up to 8 ranks)" in plan and "bytes/averaging" in plan
    # 50,112 bytes: 12,500 entries of 4 bytes, a header, 8 starts and padding. Dense: 400,000.
    assert "That is 8.0x fewer bytes than the all-reduce." in plan
    assert plan.endswith(
        "Every 10 steps: 5,011 bytes per step, 79.8x fewer than the all-reduce in every step."
    )


@on_ranks(2)
def test_stats_count_steps_since_the_last_averaging(rank):
    model = uneven()
    averager = DCTAverager(model, period=3)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(6):
        train(model, optimizer, averager, rank, [step])
        seen.append(averager.stats()["unaveraged"])
    assert seen == [1, 2, 0, 1, 2, 0]
    train(model, optimizer, averager, rank, [6])
    saved = averager.state_dict()
    assert entry(saved)["unaveraged"] == averager.stats()["unaveraged"] == seen[-1] + 1
    averager.flush()
    assert averager.stats()["unaveraged"] == entry(averager.state_dict())["unaveraged"] == 0
    averager.load_state_dict(saved)
    assert averager.stats()["unaveraged"] == seen[-1] + 1


PERIOD = 4


def _trained(rank, steps=PERIOD + 2, **options):
    """A model with residuals and two local steps, its optimizer and its averager."""
    model = uneven(rank)
    averager = DCTAverager(model, period=PERIOD, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, averager, rank, range(steps))
    return model, optimizer, averager


def _best(model):
    """Other weights, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}


def _flat(state):
    return torch.cat([value.flatten() for value in state.values()])


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ahead", [False, True])
@on_ranks(2)
def test_loaded_weights_are_the_new_base(rank, ahead, transport):
    model, optimizer, averager = _trained(rank, step_ahead=ahead, transport=transport)
    assert any(residual.any() for residual in owed(averager.state_dict()).values())
    best = _best(model)
    for _ in range(2):
        model.load_state_dict(best)
    saved = entry(averager.state_dict())["parameters"]
    assert torch.equal(torch.cat([part["base"] for part in saved.values()]), _flat(best))
    assert not any(residual.any() for residual in owed(averager.state_dict()).values())
    averager.flush()
    assert torch.equal(weights(model), _flat(best))

    train(model, optimizer, averager, rank, range(PERIOD + 2))
    saved, before = averager.state_dict(), weights(model)
    if ahead:  # the weights contain the residual of this rank, but not that of the owner
        parts = entry(saved)["parameters"].values()
        before -= torch.cat([part["residual"] for part in parts])
    model[0].load_state_dict({"weight": best["0.weight"]}, strict=False)  # lacks the bias
    with pytest.raises(RuntimeError, match="size mismatch"):
        model[4].load_state_dict({"weight": best["0.weight"], "bias": best["4.bias"]})
    replaced = {name: name in ("0.weight", "4.bias") for name in best}
    mask = _flat({name: torch.full_like(best[name], replaced[name]).bool() for name in best})
    averager.flush()  # sends the changes of the other parameters
    total = gathered(before + _flat(owed(saved)))
    expected = torch.where(mask, _flat(best), torch.stack(total).mean(0))
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-6)
    assert torch.equal(weights(model)[mask], _flat(best)[mask])
    assert_same(weights(model))


@pytest.mark.parametrize("resumes", [False, True])
@on_ranks(2)
def test_weights_that_are_loaded_and_restored_are_not_replaced(rank, resumes):
    """Rank 0 evaluates other weights. Both ranks load them into copies of the module."""
    results = []
    for evaluates in (False, True):
        model, optimizer, averager = _trained(rank)
        state = copy.deepcopy(model.state_dict())
        if evaluates:
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                other.load_state_dict(_best(model))
            if rank == 0:
                model.load_state_dict(_best(model))
                model.load_state_dict(state)
            if resumes:  # the weights are loaded after the averager
                averager.load_state_dict(averager.state_dict())
                model.load_state_dict(state)
        train(model, optimizer, averager, rank, range(PERIOD))
        results.append(torch.cat([weights(model), _flat(owed(averager.state_dict()))]))
    assert torch.equal(*results)


@on_ranks(2)
def test_different_loaded_weights_raise(rank):
    model, optimizer, averager = _trained(rank)
    model.load_state_dict({name: value + rank for name, value in _best(model).items()})
    with pytest.raises(ValueError, match=r"loaded weights must be the same on every rank"):
        train(model, optimizer, averager, rank, range(PERIOD))
