"""Entries of two bytes, "e3m0": what crosses, and that states do not know of formats."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTAverager, DCTState, WireMeter, dct_hook
from dct_parallel.wire import all_reduce_bytes
from ranks import Dictated, owed, run_ranks, weights

NUMEL = 1_000_000


def _ddp(density, value_dtype, numel=NUMEL):
    model = DistributedDataParallel(Dictated([numel]))
    state = DCTState(model, density, value_dtype=value_dtype, start_step=0)
    model.register_comm_hook(state, dct_hook)
    return model, state


def _bytes(rank):
    """Float32's over those counted below torch.distributed, in a step of the hook."""
    factors = []
    for density in (0.005, 0.01):
        model, state = _ddp(density, "e3m0")
        generator = torch.Generator().manual_seed(rank)
        model(torch.randn(NUMEL, generator=generator)).backward()
        with WireMeter() as meter:
            model(torch.randn(NUMEL, generator=generator)).backward()
            sent = meter.take()
        assert sent == state.stats()["wire_bytes"]
        assert "e3m0 values" in state.plan() and f"{sent:,}" in state.plan()
        factors.append(all_reduce_bytes(4 * NUMEL, dist.get_world_size()) / sent)
        state.close()
    return factors


def test_bytes_are_less_than_half_of_a_percent_of_float32s():
    for half_a_percent, one_percent in run_ranks(_bytes, 2):
        assert half_a_percent >= 290 and one_percent >= 140


def _changed(rank):
    """A run that saves with one format and goes on with the other loses nothing."""
    numel, total = 5000, torch.zeros(5000)
    saved, applied = None, torch.zeros(5000)
    for first_step, value_dtype in enumerate(("e3m0", torch.bfloat16, "e3m0")):
        model, state = _ddp(0.05, value_dtype, numel)
        if saved is not None:
            state.load_state_dict(saved)
        for step in range(4):
            generator = torch.Generator().manual_seed(100 * first_step + 10 * step + rank)
            grad = torch.randint(-60, 61, (numel,), generator=generator).float()
            model.zero_grad()
            model(grad).backward()
            applied += model.module.p[0].grad
            total += grad
        saved = state.state_dict()
    (left,) = owed(saved).values()
    dist.all_reduce(left)
    dist.all_reduce(total)
    assert torch.equal(applied * dist.get_world_size() + left, total)


def test_a_state_loads_into_a_run_of_another_format():
    run_ranks(_changed, 2)


def _far_apart(rank):
    """After how many averagings entries 10^4 apart have arrived. With the first threshold alone it
    were 79; once the small ones are sent the scale follows those that wait."""
    model = Dictated([4000])
    averager = DCTAverager(model, density=0.001, period=1, value_dtype="e3m0")
    with torch.no_grad():
        model.p[0][:4] = torch.tensor([1.0, 1e4, -1.0, -1e4])
    moved = weights(model)
    for step in range(1, 200):
        averager.average_parameters()
        if torch.equal(weights(model), moved):
            return step
    return None


def test_entries_far_apart_both_arrive():
    assert run_ranks(_far_apart, 2) == [6, 6]


def _at_density_one(rank):
    _, state = _ddp(1.0, "e3m0", 100)
    return state.plan()


def test_at_density_1_values_are_bfloat16():
    assert all("bfloat16 values" in plan for plan in run_ranks(_at_density_one, 2))


@pytest.mark.parametrize("value_dtype", ["e3m1", torch.float16, 3])
def test_other_formats_are_refused(value_dtype):
    rule = "value_dtype must be float32, bfloat16, 'e3m0', 'int8', 'int4' or 'ternary', got"
    with pytest.raises(TypeError, match=rule):
        DCTState(density=0.05, value_dtype=value_dtype)
