"""Which transport a bucket takes where none is asked for, and buckets of both in one model."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_parallel import DCTState
from dct_parallel.exchange import selection
from dct_parallel.exchange.codec import Settings
from ranks import Dictated, entry, gathered, hooked, integers, on_ranks
from wire_meter import WireMeter

BLOCK = 16_384
LARGEST_ENTRIES = Settings(0.005, "bfloat16")
SIZES = (1000, 500, 9 * BLOCK)  # two buckets: one of a single block, one of nine


@pytest.mark.parametrize(
    "asked, ranks, numel, taken",
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
def test_the_transport_goes_by_ranks_and_size(asked, ranks, numel, taken):
    assert selection.transport_for(asked, LARGEST_ENTRIES, numel, ranks) == taken


@pytest.mark.parametrize("ranks, taken", [(2, "all_gather"), (3, "reduce_scatter")])
def test_every_entry_goes_to_owners_sooner(ranks, taken):
    every_entry = Settings(1, "int4")
    assert selection.transport_for(None, every_entry, 2**24, ranks) == taken


@pytest.mark.parametrize("wrong", ["auto", 1, ["all_gather"], {}])
def test_what_is_no_transport_is_named(wrong):
    text = f"transport must be None, 'all_gather' or 'reduce_scatter', got {wrong!r}"
    with pytest.raises(ValueError, match=re.escape(text)):
        DCTState(transport=wrong)


def _model(**options):
    selection.GATHER_RANKS = 1  # as if two were many
    return hooked(DDP(Dictated(SIZES), bucket_cap_mb=0.1), density=0.05, **options)


def _step(model, grads):
    model.zero_grad()
    model(*grads).backward()
    return torch.cat([parameter.grad for parameter in model.module.p])


def _owed(state):
    """What all ranks together owe to the mean, flat."""
    owed = [
        parts["residual"] / 2 + parts["owner_residual"]
        for parts in entry(state.state_dict())["parameters"].values()
    ]
    total = torch.cat(owed)
    dist.all_reduce(total)
    return total


@on_ranks(2)
def test_buckets_of_one_model_go_different_ways(rank):
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
    torch.testing.assert_close(applied + _owed(state), total / 2)
    found = re.search(r"transport: (.*) \((more than .*)\), backend", state.plan())
    transports, why = found.groups()
    assert sorted(transports.split(", ")) == ["all_gather", "reduce_scatter"], state.plan()
    assert re.search(r"^0: p.2, reduce_scatter +1 ", state.plan(), re.M), state.plan()
    assert re.search(r"^1: p.1 ... p.0, all_gather +2 ", state.plan(), re.M)
    assert why == "more than 1 ranks; all_gather below 131,072 elements, 4 blocks a rank"
    # What owners keep goes on where everything is gathered, and the other way round.
    owed = _owed(state)
    saved = state.state_dict()
    gathering, other = _model(transport="all_gather", start_step=0)
    other.load_state_dict(saved)
    mean = _step(gathering, [torch.zeros(n) for n in SIZES])
    sent = sum(gathered(mean)) / 2
    left = torch.cat([p["residual"] for p in entry(other.state_dict())["parameters"].values()])
    dist.all_reduce(left)
    torch.testing.assert_close(sent + left / 2, owed)


@on_ranks(2)
def test_a_state_half_of_which_has_owners_loads_again(rank):
    """DDP leaves out a bucket that nobody used: what it is to keep waits in the form it came in."""
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
    other.load_state_dict(state.state_dict())
    owed = _owed(other)
    used = list(model.module.p)[1:]
    model.module.forward = lambda: sum(p.sum() for p in used)
    model().backward()
    mean = torch.cat([p.grad for p in used])
    other.load_state_dict(other.state_dict())
    left = _owed(other)
    assert torch.equal(left[: 9 * BLOCK], owed[: 9 * BLOCK]) and mean.count_nonzero()
    torch.testing.assert_close(left[9 * BLOCK :] + mean, owed[9 * BLOCK :] + 1)


@on_ranks(2)
def test_an_empty_parameter_may_have_a_bucket_of_its_own(rank):
    """A bucket of an empty parameter alone."""
    sizes = (0, 2000)
    for transport in ("all_gather", "reduce_scatter"):
        model, state = hooked(
            DDP(Dictated(sizes), bucket_cap_mb=0.001), density=1, start_step=0, transport=transport
        )
        for _ in range(3):
            model.zero_grad()
            model(*[torch.ones(n) + rank for n in sizes]).backward()
            assert torch.equal(model.module.p[1].grad, torch.full((2000,), 1.5)), transport
        assert "buckets: 2" in state.plan()
        state.close()
