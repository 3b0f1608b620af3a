"""Transport "reduce_scatter": owners sum ranges of a bucket and compress the mean once more."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_kernels import payload_layout
from dct_parallel.exchange.codec import Settings
from dct_parallel.exchange.plan import BucketPlan
from ranks import (
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
    run_ranks,
    train_step,
    weights,
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


def _bits(tensors):
    return torch.cat(tensors).view(torch.int32)


@pytest.mark.parametrize(
    "world_size, sizes", [(2, SIZES), (2, ONE_BLOCK), (4, SIZES), (4, THREE_OF_FOUR)]
)
@on_ranks("world_size")
def test_at_density_one_in_float32_it_is_gather_and_the_sum_in_rank_order(rank, sizes):
    ranks = dist.get_world_size()
    lossless = {"density": 1, "format": torch.float32}
    sharded, _ = _model(sizes, **lossless)
    gathering, _ = _model(sizes, transport="all_gather", **lossless)
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * step + rank)
        grads = [torch.randn(n, generator=generator) for n in sizes]
        ours, theirs = _step(sharded, grads), _step(gathering, grads)
        assert torch.equal(_bits(ours), _bits(theirs)), step
        if step >= 2:
            for own, grad in zip(ours, grads, strict=True):
                total = torch.zeros_like(grad)
                for part in gathered(grad):
                    total = total + part
                assert torch.equal(own, total * torch.tensor(1 / ranks, dtype=torch.float32))


@pytest.mark.parametrize(
    "world_size, sizes, start_step",
    [(2, SIZES, 2), (2, SIZES, 0), (2, ONE_BLOCK, 2), (4, THREE_OF_FOUR, 2)],
)
@on_ranks("world_size")
def test_what_was_applied_and_what_both_residuals_hold_is_every_gradient(rank, sizes, start_step):
    """Integer gradients: sums, and means over a power of two, are exact."""
    ranks = dist.get_world_size()
    model, state = _model(sizes, start_step=start_step)
    applied = [torch.zeros(n) for n in sizes]
    total = [torch.zeros(n) for n in sizes]
    kept = 0
    for step in range(12):
        grads = integers(sizes, step, rank)
        for index, mean in enumerate(_step(model, grads)):
            assert_same(mean)
            applied[index] += mean
            total[index] += grads[index]
    for index, (name, left) in enumerate(owed(state.state_dict()).items()):
        dist.all_reduce(left)
        dist.all_reduce(total[index])
        assert torch.equal(applied[index] * ranks + left, total[index]), name
    for parameter in entry(state.state_dict())["parameters"].values():
        kept += int(parameter["owner_residual"][0].count_nonzero())
    owners = {SIZES: 2, ONE_BLOCK: 1, THREE_OF_FOUR: 3}[sizes]
    assert (kept > 100) == (rank < owners)


@on_ranks(2)
def test_what_owners_owe_is_not_lost_when_buckets_change(rank):
    """DDP deals its buckets anew after the first step, which was compressed already."""
    model, state = hooked(
        ddp(Dictated(SIZES)), density=0.05, transport="reduce_scatter", start_step=0
    )
    layouts, total, applied = set(), torch.zeros(sum(SIZES)), torch.zeros(sum(SIZES))
    for step in range(6):
        grads = integers(SIZES, step, rank)
        applied += torch.cat(_step(model, grads))
        total += torch.cat(grads)
        layouts.add(tuple(bucket.plan.names for bucket in state._buckets.in_order()))
    left = torch.cat(list(owed(state.state_dict()).values()))
    dist.all_reduce(left)
    dist.all_reduce(total)
    assert torch.equal(2 * applied + left, total)
    assert len(layouts) == 2


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


def _state_parts(state):
    # Only the next step takes back what a skipped one sent; asking for a state does it, too.
    parameters = entry(state.state_dict())["parameters"].values()
    residuals = torch.cat([p["residual"] for p in parameters])
    owners = [owner for p in parameters for owner in p["owner_residual"]]  # none at the start
    return residuals, torch.cat(owners or [torch.zeros(0)])


@pytest.mark.parametrize("poison", [[17], list(range(1, 30_000))], ids=["one", "flood"])
@on_ranks(2)
def test_a_skipped_step_is_taken_back_from_both_residuals(rank, poison):
    """A GradScaler skips a step: both residuals are as if its payloads had come back."""
    model, state = _model(SIZES, grad_scaler=(scaler := torch.amp.GradScaler("cpu", 64.0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total = torch.zeros(sum(SIZES))
    for step in range(9):
        before, parts = weights(model), _state_parts(state)
        grads = integers(SIZES, step, rank)
        if step == 6 and rank == 0:
            for index in poison:
                grads[2][index] = torch.inf
        optimizer.zero_grad()
        scaler.scale(model(*grads)).backward()
        scaler.step(optimizer)
        scaler.update()
        finite = torch.cat([torch.where(g.isfinite(), g, 0.0) for g in grads])
        total += finite
        if step == 6:
            assert torch.equal(weights(model), before)
            residual, owner = _state_parts(state)
            assert torch.equal(residual, parts[0] + finite)
            assert torch.equal(owner, parts[1]) and owner.count_nonzero() > 1000
    left = torch.cat(list(owed(state.state_dict()).values()))
    dist.all_reduce(left)
    dist.all_reduce(total)
    assert torch.equal(left - 2 * weights(model), total)
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize(
    "ranks, steps, part", [(2, 150, 1), pytest.param(4, 2000, 0.5, marks=pytest.mark.large)]
)
@on_ranks("ranks", timeout=900)
def test_ranks_stay_bitwise_equal_and_learn(rank, steps, part):
    model, state = hooked(
        DDP(mlp(width=160), bucket_cap_mb=0.2), density=0.01, transport="reduce_scatter"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = [
        train_step(model, optimizer, *batch(step % 50, rank, width=160)).item()
        for step in range(steps)
    ]
    assert len(state._buckets.in_order()) >= 2
    assert_same(weights(model))
    assert weights(model).isfinite().all()
    assert sum(losses[-20:]) < part * sum(losses[:20])
