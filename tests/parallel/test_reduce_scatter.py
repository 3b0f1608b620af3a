"""Transport "reduce_scatter": each owner sums a range of a bucket and compresses the mean again."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_kernels import payload_layout
from dct_parallel.exchange.plan import BucketPlan
from dct_parallel.exchange.settings import Settings
from support.ranks import (
    Dictated,
    hooked,
    integers,
    run_ranks,
)
from wire_meter import WireMeter

BLOCK = 16_384
# 4 blocks, the last of 948 elements. With 2 ranks, the second range is shorter, and the ranges
# split a large parameter. With 4 ranks, a range is one block.
SIZES = (20_000, 100, 30_000)
ONE_BLOCK = (2_000, 30, 5_000)  # only rank 0 owns a block
THREE_OF_FOUR = (40_000,)  # 3 blocks, so the last of 4 ranks owns nothing


def _model(sizes, **options):
    return hooked(
        DDP(Dictated(sizes)), **{"density": 0.05, "transport": "reduce_scatter"} | options
    )


def _step(model, grads):
    model.zero_grad()
    model(*grads).backward()
    return [parameter.grad.clone() for parameter in model.module.p]


def _counted(rank, sizes, density):
    """Return (bytes counted at collectives, bytes reported by `stats`) of a compressed step."""
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
def test_bytes_match_the_formula(world_size, sizes):
    numel = sum(sizes)
    blocks = -(-numel // BLOCK)
    length = BLOCK * -(-blocks // world_size)
    owners = -(-numel // length)
    counted = run_ranks(_counted, world_size, sizes, 0.05)
    settings = Settings(0.05, "bfloat16")
    names = tuple(map(str, range(len(sizes))))
    plan = BucketPlan(names, sizes[::-1], settings, "reduce_scatter", world_size)
    assert plan.capacity == -(-min(length, numel) * 125 // 2000)  # capacity of the longest range
    nbytes = payload_layout(numel, plan.capacity, torch.bfloat16, world_size).nbytes
    for rank, (sent, planned) in enumerate(counted):
        to_owners = owners - (rank < owners)
        assert sent == (to_owners + world_size - 1) * nbytes
        assert planned == max(sent for sent, _ in counted)


def test_total_bytes_are_those_of_a_parameter_server():
    """In total, ranks send the bytes of a parameter server, minus entries that stay on a rank."""
    ranks, sizes = 4, (4 * BLOCK,)
    sent = [counted for counted, _ in run_ranks(_counted, ranks, sizes, 0.05)]
    settings = Settings(0.05, "bfloat16")
    message = BucketPlan(("p.0",), sizes, settings, "all_gather", ranks).payload_bytes
    server = 2 * ranks * message  # one message and one answer per rank
    assert 0.75 * server <= sum(sent) < 0.8 * server  # shorter messages have more headers
    assert 2 * max(sent) < 0.4 * server  # sent and received by the busiest rank


@pytest.mark.parametrize("numel", [2**22, 10**7])
def test_ratio_to_ring_all_reduce_does_not_depend_on_ranks(numel):
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
