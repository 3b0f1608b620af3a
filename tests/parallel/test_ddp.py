"""Training with the hook on 1 to 4 ranks: exact results, equality of ranks, and overlap."""

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
    hooked,
    integers,
    mlp,
    on_ranks,
    train,
    train_step,
    weights,
)


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
