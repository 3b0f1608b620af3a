"""States do not know of the dtype of values, and others are refused."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTState, dct_hook
from ranks import Dictated, owed, run_ranks


def _ddp(density, value_dtype, numel):
    model = DistributedDataParallel(Dictated([numel]))
    state = DCTState(model, density, value_dtype=value_dtype, start_step=0)
    model.register_comm_hook(state, dct_hook)
    return model, state


def _changed(rank):
    """A run that saves with one dtype and goes on with the other loses nothing."""
    numel, total = 5000, torch.zeros(5000)
    saved, applied = None, torch.zeros(5000)
    for first_step, value_dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
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


def test_a_state_loads_into_a_run_of_another_dtype():
    run_ranks(_changed, 2)


@pytest.mark.parametrize("value_dtype", ["fp8", torch.float16, 3])
def test_others_are_refused(value_dtype):
    rule = "value_dtype must be float32, bfloat16, 'int8', 'int4' or 'ternary', got"
    with pytest.raises(TypeError, match=rule):
        DCTState(density=0.05, value_dtype=value_dtype)
