"""Folders of torch.distributed.checkpoint, read by the other transport: what is owed stays."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dct_parallel import DCTAverager
from nodes import SIZES, TRANSPORTS, meshed_model, owed_by_all, same_step
from ranks import assert_same, gathered, integers, on_ranks

BOTH_WAYS = (TRANSPORTS, TRANSPORTS[::-1])


def _near(now, before):
    torch.testing.assert_close(now, before, rtol=0, atol=1e-6 * before.abs().max().item())


@on_ranks(4)
def test_the_hook_in_a_mesh_of_nodes(rank, tmp_path):
    warnings.filterwarnings("ignore", category=FutureWarning)  # of DCP itself
    options = {"format": "int4", "density": None, "start_step": 0}
    for saved, loaded in BOTH_WAYS:
        model, state = meshed_model(SIZES, 2, transport=saved, **options)
        applied = total = torch.zeros(sum(SIZES), dtype=torch.float64)
        for step in range(3):
            grads = integers(SIZES, step, rank)
            applied = applied + same_step(model, grads)
            total = total + torch.cat(grads)
        dist.all_reduce(total)
        total /= dist.get_world_size()
        folder = tmp_path / saved
        dcp.save({"dct": state}, checkpoint_id=folder)
        _near(applied + owed_by_all(state.state_dict()), total)

        resumed, again = meshed_model(SIZES, 2, transport=loaded, **options)
        dcp.load({"dct": again}, checkpoint_id=folder)
        owed = owed_by_all(again.state_dict())
        assert again.step == 3 and owed.count_nonzero() > 10_000
        _near(applied + owed, total)
        for _ in range(2):
            applied = applied + same_step(resumed, [torch.zeros(n) for n in SIZES])
        _near(applied + owed_by_all(again.state_dict()), total)
        dcp.load({"dct": again}, checkpoint_id=folder)  # into buckets that are in use
        assert torch.equal(owed_by_all(again.state_dict()), owed)


@on_ranks(2)
def test_the_averager(rank, tmp_path):
    """flush() applies all that is owed: then weights are the base plus the mean of all changes."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of DCP itself
    for saved, loaded in BOTH_WAYS:
        torch.manual_seed(0)
        module = nn.Linear(300, 300)
        averager = DCTAverager(module, period=1, format="int4", transport=saved)
        expected = module.weight.detach().double()
        for step in range(3):
            (moved,) = integers((90_000,), step, rank)
            with torch.no_grad():
                module.weight += moved.view(300, 300)
            expected += sum(gathered(moved)).double().view(300, 300) / 2
            averager.average_parameters()
        assert (module.weight - expected).abs().max() > 0.1  # much is owed
        dcp.save({"averager": averager}, checkpoint_id=tmp_path / saved)
        again = DCTAverager(module, period=1, format="int4", transport=loaded)
        dcp.load({"averager": again}, checkpoint_id=tmp_path / saved)
        assert again.step == 3
        again.flush()
        _near(module.weight.detach().double(), expected)
        assert_same(module.weight)
