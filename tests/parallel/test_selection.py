"""The default transport of a bucket, and models whose buckets use different transports."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_kernels import payload_layout, quantized_payload_bytes
from dct_parallel.exchange import plan
from dct_parallel.exchange.settings import Settings
from support.nodes import all_pending
from support.ranks import Dictated, gathered, hooked, integers, on_ranks
from wire_meter import WireMeter

BLOCK = 16_384
SIZES = (1000, 500, 9 * BLOCK)  # two buckets: one of a single block, one of nine


@pytest.mark.parametrize(
    "requested, ranks, numel, expected",
    [
        (None, 2, 2**24, "all_gather"),
        (None, 8, 2**30, "all_gather"),
        (None, 9, 4 * 9 * BLOCK - 1, "all_gather"),
        (None, 9, 4 * 9 * BLOCK, "reduce_scatter"),
        (None, 64, 4 * 64 * BLOCK - 1, "all_gather"),
        (None, 64, 2**24, "reduce_scatter"),
        ("all_gather", 64, 2**24, "all_gather"),
        ("reduce_scatter", 2, 1, "reduce_scatter"),
    ],
)
def test_default_transport_depends_on_ranks_and_size(requested, ranks, numel, expected):
    settings = Settings(0.005, "bfloat16", transport=requested)
    assert plan.transport_for(settings, numel, ranks) == expected


@pytest.mark.parametrize("format", ["float32", "bfloat16", "int4", "ternary"])
def test_dense_buckets_use_the_transport_with_fewer_bytes(format):
    """With 3 or more ranks, it is reduce_scatter, except for 1 block, or 2 blocks on 3 ranks."""
    dense = Settings(1, format)
    row = quantized_payload_bytes(1024, format) - 64
    for ranks, blocks in itertools.product((1, 2, 3, 8, 100, 128), (1, 2, 3, 15, 16, 400)):
        taken = plan.transport_for(dense, blocks * BLOCK, ranks)
        each = -(-blocks // ranks)  # blocks per range
        owners = -(-blocks // each)
        gathered = (ranks - 1) * (64 + 16 * row * blocks)
        scattered = (min(owners, ranks - 1) + ranks - 1) * (64 + 16 * row * each)
        assert taken == ("reduce_scatter" if scattered < gathered else "all_gather")
        assert (taken == "all_gather") == (ranks < 3 or blocks == 1 or (ranks, blocks) == (3, 2))
    assert not plan.keeps_owners(dense, 2)
    assert plan.keeps_owners(dense, 3)


def _model(**options):
    plan.GATHER_RANKS = 1  # so that 2 ranks use reduce_scatter by default
    return hooked(DDP(Dictated(SIZES), bucket_cap_mb=0.1), density=0.05, **options)


def _step(model, grads):
    model.zero_grad()
    model(*grads).backward()
    return torch.cat([parameter.grad for parameter in model.module.p])


@on_ranks(2)
def test_buckets_of_one_model_can_use_different_transports(rank):
    model, state = _model()
    applied, total = 0, 0
    with WireMeter() as meter:
        for step in range(6):
            meter.take()
            mean = _step(model, integers(SIZES, step, rank))
            sent = meter.take()
            assert torch.equal(*gathered(mean))
            applied = applied + mean
            total = total + torch.cat(integers(SIZES, step, rank))
        assert state.stats()["wire_bytes"] == sent
    dist.all_reduce(total)
    torch.testing.assert_close(applied + all_pending(state.state_dict()), total.double() / 2)
    found = re.search(r"transport: (.*) \((more than .*)\), backend", state.plan())
    transports, why = found.groups()
    assert sorted(transports.split(", ")) == ["all_gather", "reduce_scatter"], state.plan()
    assert re.search(r"^0: p.2, reduce_scatter +1 ", state.plan(), re.M), state.plan()
    assert re.search(r"^1: p.1 ... p.0, all_gather +2 ", state.plan(), re.M)
    assert why == "more than 1 ranks; all_gather below 131,072 elements, 4 blocks per rank"


@on_ranks(4)
def test_ranks_without_a_range_send_to_all_owners(rank):
    """Four ranks exchange three blocks, so the last rank owns no range."""
    sizes, owners = (40_000,), 3
    model, state = hooked(DDP(Dictated(sizes)), density=0.05, transport="reduce_scatter")
    with WireMeter() as meter:
        for step in range(4):
            meter.take()
            _step(model, integers(sizes, step, rank))
        sent = meter.take()
    capacity = -(-BLOCK * 125 // 2000)  # 1.25 * density * numel of the longest range
    nbytes = payload_layout(*sizes, capacity, torch.bfloat16, 4).nbytes
    assert sent == (owners - (rank < owners) + 3) * nbytes
    assert state.stats()["wire_bytes"] == 6 * nbytes
    assert f" {owners * capacity:,} " in state.plan()


@on_ranks(2)
def test_state_of_both_transports_loads(rank):
    """DDP skips a bucket that no rank used, so its loaded residuals are not yet converted."""
    sizes = (9 * BLOCK, 1000, 500)

    def made(transport, **options):
        return hooked(
            DDP(Dictated(sizes), bucket_cap_mb=0.1, **options),
            density=0.05,
            start_step=0,
            transport=transport,
        )

    model, state = made("reduce_scatter")
    for _ in range(2):
        _step(model, [torch.randn(n) for n in sizes])
    unused = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model, other = made("all_gather", **unused)
    with pytest.warns(UserWarning, match="transport reduce_scatter, .* transport all_gather"):
        other.load_state_dict(state.state_dict())
    pending = all_pending(other.state_dict())
    used = list(model.module.p)[1:]
    model.module.forward = lambda: sum(p.sum() for p in used)
    model().backward()
    mean = torch.cat([p.grad for p in used])
    other.load_state_dict(other.state_dict())
    left = all_pending(other.state_dict())
    assert torch.equal(left[: 9 * BLOCK], pending[: 9 * BLOCK]) and mean.count_nonzero()
    torch.testing.assert_close(left[9 * BLOCK :] + mean, pending[9 * BLOCK :] + 1)


@on_ranks(2)
def test_bucket_with_only_an_empty_parameter(rank):
    sizes = (0, 2000)
    for transport in ("all_gather", "reduce_scatter"):
        options = {"density": 1, "format": "bfloat16", "start_step": 0, "transport": transport}
        model, state = hooked(DDP(Dictated(sizes), bucket_cap_mb=0.001), **options)
        for _ in range(3):
            model.zero_grad()
            model(*[torch.ones(n) + rank for n in sizes]).backward()
            assert torch.equal(model.module.p[1].grad, torch.full((2000,), 1.5)), transport
        assert "buckets: 2" in state.plan()
        state.close()
