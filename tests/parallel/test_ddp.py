"""Training with the hook on 1 to 4 ranks: exact results, equality of ranks, and overlap."""

import itertools
import math
import random
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_parallel import DCTState, dct_hook
from dct_parallel.exchange import reduce_scatter as by_reduce_scatter
from dct_parallel.exchange import transport as by_all_gather
from support.ranks import (
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
    train,
    train_step,
    weights,
)


def _dense_in_rank_order(state, bucket):
    """A hook that averages in bfloat16 for two steps, and then in float32 in rank order."""
    buffer, ranks = bucket.buffer(), dist.get_world_size()
    if state["step"] < 2:
        mean = buffer.to(torch.bfloat16).div_(ranks)
        dist.all_reduce(mean)
        buffer.copy_(mean)
    else:
        total = torch.zeros_like(buffer)
        for part in gathered(buffer):
            total = total + part
        buffer.copy_(total * torch.tensor(1 / ranks, dtype=torch.float32))
    state["step"] += bucket.is_last()
    future = torch.futures.Future()
    future.set_result(buffer)
    return future


def _train(rank, make_state, hook, steps):
    model = ddp(mlp())
    model.register_comm_hook(make_state(model), hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, optimizer, rank, range(steps))
    return weights(model)


@on_ranks(4)
def test_density_1_in_float32_is_bitwise_equal_to_dense(rank):
    def lossless(model):
        return DCTState(model, density=1, format=torch.float32)

    dct = _train(rank, lossless, dct_hook, 12)
    dense = _train(rank, lambda model: {"step": 0}, _dense_in_rank_order, 12)
    torch.testing.assert_close(dct, dense, rtol=0, atol=0)
    assert not torch.equal(dct, weights(mlp())), "nothing was trained"


@pytest.mark.parametrize(
    "world_size, steps, transport", [(4, 40, "all_gather"), (2, 60, "reduce_scatter")]
)
@on_ranks("world_size")
def test_ranks_stay_bitwise_equal_with_random_delays(rank, steps, transport):
    """Each rank sleeps for random times in the hook and before each gather."""
    dice = random.Random(rank)
    model = ddp(mlp(depth=6))
    state = DCTState(model, density=0.1, transport=transport)
    indices = []

    def hook(state, bucket):
        indices.append(bucket.index())
        time.sleep(dice.random() * 0.004)
        return dct_hook(state, bucket)

    all_gather = by_all_gather.all_gather

    def slow_gather(*args, **options):
        time.sleep(dice.random() * 0.004)
        return all_gather(*args, **options)

    by_all_gather.all_gather = by_reduce_scatter.all_gather = slow_gather
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        train_step(model, optimizer, *batch(step, rank))
        dist.all_reduce(torch.ones(1))  # between steps, on the default group
    assert max(indices) >= 2, "fewer than 3 buckets"
    assert_same(weights(model))
    assert weights(model).isfinite().all()


SIZES = (2000, 30, 5000, 255, 256, 70)


def _residuals(state):
    return {name: p["residual"] for name, p in entry(state.state_dict())["parameters"].items()}


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
@on_ranks(2)
def test_payload_contains_the_largest_entries(rank, transport):
    """Every payload contains the entries that reach the threshold, up to its capacity."""
    model, state = hooked(
        ddp(Dictated(SIZES)), density=0.05, transport=transport, format=torch.float32
    )
    for step in range(4):
        model.zero_grad()
        before = _residuals(state)
        grads = [5.0**index * g for index, g in enumerate(integers(SIZES, step, rank, limit=60))]
        model(*grads).backward()
        if step < 2:
            continue
        after = _residuals(state)
        for plan in state._buckets.plans():
            index = [int(name.split(".")[1]) for name in plan.names]
            accumulated = torch.cat([before[f"p.{i}"] + grads[i] for i in index])
            sent = accumulated != torch.cat([after[f"p.{i}"] for i in index])
            for low, high in itertools.pairwise(plan.range_bounds):
                acc = accumulated[low:high].abs()
                count = math.ceil(0.05 * (high - low))
                if high - low > 4096:  # a sample determines the threshold
                    assert 0.7 * count < sent[low:high].sum() <= plan.capacity
                elif high > low:
                    threshold = acc.sort().values[-count]
                    passed = ((acc >= threshold) & (acc > 0)).nonzero().flatten()
                    expected = torch.zeros(high - low, dtype=torch.bool)
                    expected[passed[: plan.capacity]] = True  # in order, up to the capacity
                    assert torch.equal(sent[low:high], expected)
    assert len(state._buckets.plans()) >= 2


@on_ranks(1)
def test_single_rank_trains_and_sends_nothing(rank):
    model, state = hooked(ddp(mlp()), density=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = [train_step(model, optimizer, *batch(step % 4, rank)).item() for step in range(60)]
    assert sum(losses[-4:]) / 4 < losses[0]
    assert state.stats()["wire_bytes"] == 0
    assert "fewer bytes" not in state.plan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on_ranks(2)
def test_half_precision_models(rank, dtype):
    """The mean is exact, because gradients are small integers and the density is 1."""
    model, _ = hooked(ddp(Dictated(SIZES).to(dtype)), density=1, format="bfloat16")
    for step in range(4):
        model.zero_grad()
        every = [integers(SIZES, step, r, limit=16) for r in range(2)]
        model(*(g.to(dtype) for g in every[rank])).backward()
        for index, parameter in enumerate(model.module.p):
            assert parameter.grad.dtype == dtype
            assert torch.equal(parameter.grad, ((every[0][index] + every[1][index]) / 2).to(dtype))


@on_ranks(4)
def test_process_group_limits_averaging(rank):
    """Two groups of two ranks exchange nothing with each other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    outer = ddp(Dictated(SIZES))
    inner = ddp(Dictated(SIZES), process_group=group)
    options = {"density": 1, "format": "bfloat16"}
    states = [DCTState(outer, process_group=group, **options), DCTState(inner, **options)]
    for model, state in zip((outer, inner), states, strict=True):
        model.register_comm_hook(state, dct_hook)
        for _ in range(4):
            model.zero_grad()
            model(*(torch.full((n,), float(rank)) for n in SIZES)).backward()
        for parameter in model.module.p:
            mean = 0.5 if rank < 2 else 2.5
            assert torch.equal(parameter.grad, torch.full_like(parameter, mean))


@on_ranks(2)
def test_nan_is_sent_but_not_kept(rank):
    """Without a GradScaler, a NaN reaches the gradients, as without the hook."""
    model, state = hooked(ddp(Dictated(SIZES)), density=0.05)
    total, applied = torch.zeros(SIZES[0]), torch.zeros(SIZES[0])
    for step in range(4):
        model.zero_grad()
        grads = integers(SIZES, step, rank, limit=60)
        if step == 3 and rank == 0:
            grads[2][11] = torch.nan
        model(*grads).backward()
        total += grads[0]
        applied += model.module.p[0].grad
    left = entry(state.state_dict())["parameters"]["p.0"]["residual"]
    dist.all_reduce(left)
    dist.all_reduce(total)
    assert torch.equal(2 * applied + left, total)  # the step was not skipped
    bad = [parameter.grad.isnan().nonzero().flatten().tolist() for parameter in model.module.p]
    residual = torch.cat([s["residual"] for s in entry(state.state_dict())["parameters"].values()])
    assert bad == [[], [], [11], [], [], []] and residual.isfinite().all()


@on_ranks(2)
def test_a_compiled_model_trains_like_an_eager_one(rank):
    results = []
    for wrap in (torch.compile, lambda model, backend: model):
        model, _ = hooked(wrap(DDP(mlp()), backend="aot_eager"), density=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(model, optimizer, rank, range(6))
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[1])
    assert not torch.equal(results[0], weights(mlp())), "nothing was trained"


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
@on_ranks(2)
def test_exchanges_overlap_the_backward_pass(rank, transport):
    """Each exchange waits until the backward pass has reached the last bucket."""
    model = ddp(mlp(depth=6))
    state = DCTState(model, density=0.1, transport=transport)
    reached_last_bucket = threading.Event()
    exchanged = []

    def hook(state, bucket):
        future = dct_hook(state, bucket)
        if bucket.is_last():
            reached_last_bucket.set()
        return future

    all_gather = by_all_gather.all_gather

    class Waiting:
        def __init__(self, *args, **options):
            self.exchange = partial(all_gather, *args, **options)

        def wait(self):
            # This would time out if the backward pass waited for this exchange.
            exchanged.append(reached_last_bucket.wait(20))
            return self.exchange()

    def waiting(*args, async_op=False):
        exchange = Waiting(*args)
        return exchange if async_op else exchange.wait()

    model.register_comm_hook(state, hook)
    for step in range(4):
        if step == 2:  # the first compressed step; buckets are final
            by_all_gather.all_gather = by_reduce_scatter.all_gather = waiting
        reached_last_bucket.clear()
        model(batch(step, rank)[0]).sum().backward()
    assert len(exchanged) == 2 * len(state._buckets.in_order()) >= 6 and all(exchanged)
