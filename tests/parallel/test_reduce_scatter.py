"""Transport "reduce_scatter": owners sum ranges of a bucket and compress the mean once more."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_kernels import payload_layout
from dct_parallel.exchange.plan import BucketPlan
from dct_parallel.exchange.settings import Settings
from ranks import (
    Dictated,
    hooked,
    integers,
    run_ranks,
)
from wire_meter import WireMeter

BLOCK = 16_384
# In DDP's order p.2 comes first. 4 blocks, the last of 948 elements: on 2 ranks the second range is
# shorter than the first, and both cut through p.2 or p.0; on 4 a range is a block.
SIZES = (20_000, 100, 30_000)
ONE_BLOCK = (2_000, 30, 5_000)  # only rank 0 owns something
THREE_OF_FOUR = (40_000,)  # blocks: on 4 ranks the last owns nothing


def _model(sizes, **options):
    return hooked(
        DDP(Dictated(sizes)), **{"density": 0.05, "transport": "reduce_scatter"} | options
    )


def _step(model, grads):
    model.zero_grad()
    model(*grads).backward()
    return [parameter.grad.clone() for parameter in model.module.p]


def _counted(rank, sizes, density):
    """(bytes at the collectives, as the plan says) of a compressed step."""
    model, state = _model(sizes, density=density)
    with WireMeter() as meter:
        for step in range(4):
            meter.take()
            _step(model, integers(sizes, step, rank))
        state.stats()
        return meter.take(), state.stats()["wire_bytes"]


@pytest.mark.parametrize(
    "world_size, sizes", [(2, SIZES), (2, ONE_BLOCK), (4, SIZES), (4, THREE_OF_FOUR)]
)
def test_bytes_at_the_collectives_are_those_of_the_formula(world_size, sizes):
    numel = sum(sizes)
    blocks = -(-numel // BLOCK)
    length = BLOCK * -(-blocks // world_size)
    owners = -(-numel // length)
    counted = run_ranks(_counted, world_size, sizes, 0.05)
    settings = Settings(0.05, "bfloat16")
    names = tuple(map(str, range(len(sizes))))
    plan = BucketPlan(names, sizes[::-1], settings, "reduce_scatter", world_size)
    assert plan.capacity == -(-min(length, numel) * 125 // 2000)  # of the longest range
    nbytes = payload_layout(numel, plan.capacity, torch.bfloat16, world_size).nbytes
    for rank, (sent, planned) in enumerate(counted):
        to_owners = owners - (rank < owners)
        assert sent == (to_owners + world_size - 1) * nbytes
        assert planned == max(sent for sent, _ in counted)


def test_owners_are_a_parameter_server_in_shards():
    """Counted: all send what one server would take and give, less what stays with its owner."""
    ranks, sizes = 4, (4 * BLOCK,)
    sent = [counted for counted, _ in run_ranks(_counted, ranks, sizes, 0.05)]
    settings = Settings(0.05, "bfloat16")
    whole = BucketPlan(("p.0",), sizes, settings, "all_gather", ranks).payload_bytes
    server = 2 * ranks * whole  # messages of all ranks, and as many answers
    assert 0.75 * server <= sum(sent) < 0.8 * server  # headers of shorter messages
    assert 2 * max(sent) < 0.4 * server  # into and out of the busiest rank


@pytest.mark.parametrize("numel", [2**22, 10**7])
def test_its_ratio_to_a_ring_all_reduce_is_the_same_on_any_number_of_ranks(numel):
    def ratio(transport, ranks, numel=numel):
        settings = Settings(0.005, "bfloat16")
        plan = BucketPlan(("p",), (numel,), settings, transport, ranks)
        return 2 * (ranks - 1) / ranks * 4 * numel / plan.wire_bytes

    ratios = [ratio("reduce_scatter", ranks) for ranks in (2, 4, 8)]
    assert max(ratios) < 1.05 * min(ratios) and min(ratios) > 150
    assert ratio("all_gather", 2) / ratio("all_gather", 8) == pytest.approx(4)
    assert ratio("reduce_scatter", 2, 2**22) == pytest.approx(
        ratio("all_gather", 2, 2**22), rel=0.01
    )
