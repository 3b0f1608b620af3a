"""DCTAverager when `load_state_dict` of the module replaces weights between averagings."""

import copy
import pickle

import pytest
import torch

from dct_parallel import DCTAverager
from support.averaged import train, uneven
from support.ranks import assert_same, entry, gathered, on_ranks, owed, weights

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
