"""DCTAverager: averaged weights, equality of ranks, and statistics."""

import pytest
import torch
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer

from dct_kernels import payload_layout
from dct_parallel import DCTAverager
from dct_parallel.collectives import all_reduce_bytes
from support.averaged import adamw, train, uneven
from support.ranks import assert_same, batch, entry, gathered, on_ranks, train_step, weights
from wire_meter import WireMeter

PERIOD = 3


@on_ranks(2)
def test_density_1_is_bitwise_the_mean_of_all_changes(rank):
    """The reference model adds the mean of all ranks' changes to the base."""
    model, reference = uneven(rank), uneven(0)  # the averager broadcasts rank 0's weights
    averager = DCTAverager(model, density=1, period=PERIOD, format=torch.float32)
    optimizer, reference_optimizer = adamw(model), adamw(reference)
    base = weights(reference)
    for step in range(2 * PERIOD):
        train_step(reference, reference_optimizer, *batch(step, rank, 32))
        train(model, optimizer, averager, rank, [step])
        if (step + 1) % PERIOD == 0:
            moved = gathered(weights(reference) - base)
            base += (moved[0] + moved[1]) / 2
            nn.utils.vector_to_parameters(base.clone(), reference.parameters())
        assert torch.equal(weights(model), weights(reference)), step
    assert_same(weights(model))


@on_ranks(2)
def test_flush_sends_all_pending_changes(rank):
    """Changes are multiples of 1/8, which are exact in both dtypes."""
    dtypes = torch.float32, torch.bfloat16
    model = nn.ParameterList([torch.zeros(3000, dtype=dtype) for dtype in dtypes])
    averager = DCTAverager(model, density=0.05, period=2)
    generator = torch.Generator().manual_seed(rank)
    moved = torch.zeros(6000)
    for step in range(1, 8):
        move = torch.randint(-8, 9, (2, 3000), generator=generator) / 8.0
        moved += move.flatten()
        with torch.no_grad():
            for parameter, part in zip(model, move, strict=True):
                parameter += part
        averager.average_parameters()
        if step in (4, 7):
            waits = [s["residual"] for s in entry(averager.state_dict())["parameters"].values()]
            assert torch.cat(waits).count_nonzero() > 1000
            with WireMeter() as meter:
                averager.flush()
                assert meter.take() == all_reduce_bytes(4 * 6000, 2)
            saved = entry(averager.state_dict())["parameters"].values()
            assert not any(state["residual"].any() for state in saved)
            mean = sum(gathered(moved)) / 2
            assert torch.equal(torch.cat([state["base"] for state in saved]), mean)
            assert torch.equal(model[1], mean[3000:].bfloat16())
    assert averager.step == 7
    before = averager.state_dict()
    with torch.no_grad():
        model[0][0] = torch.inf if rank else 1.0
    with pytest.raises(RuntimeError, match="dct::flush: weights must be finite on every rank"):
        averager.flush()
    assert torch.equal(entry(before)["parameters"]["0"]["base"], averager._base[:3000])


@on_ranks(2)
def test_stats_and_plan_report_density_and_bytes(rank):
    model = nn.Linear(1000, 100, bias=False)
    averager = DCTAverager(model, density=0.1, period=10)
    nothing_yet = {"step": 0, "density": None, "overflow": None, "unaveraged": 0}
    assert averager.stats() == nothing_yet | {"wire_bytes": averager.wire_bytes}
    for _ in range(20):
        with torch.no_grad():
            model.weight += torch.randn(100, 1000)
        averager.average_parameters()
    stats = averager.stats()
    assert stats["step"] == 20 and 0.05 < stats["density"] < 0.126
    plan = averager.plan()
    assert "all_gather (up to 8 ranks)" in plan and "bytes/averaging" in plan
    # 50,112 bytes: 12,500 entries of 4 bytes, a header, 8 starts and padding. Dense: 400,000.
    assert "That is 8.0x fewer bytes than the all-reduce." in plan
    assert plan.endswith(
        "Every 10 steps: 5,011 bytes per step, 79.8x fewer than the all-reduce in every step."
    )


@on_ranks(2)
def test_ranks_stay_equal_over_2000_steps(rank):
    """Ranks average at the same steps and have equal weights afterwards."""
    model = nn.Linear(20, 20)
    averager = DCTAverager(model, density=0.1, period=40)
    finish, averaged = averager._bucket.finish, []
    averager._bucket.finish = lambda out: averaged.append(averager.step) or finish(out)
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, 2_001):
        with torch.no_grad():
            model.weight[step % 20] += torch.rand((), generator=generator)
        averager.average_parameters()
        if step % 200 == 0:
            assert_same(weights(model))
    assert averaged == list(range(40, 2_001, 40))


@on_ranks(2)
def test_wire_bytes_match_the_meter(rank):
    model = nn.ParameterList([torch.zeros(5000), torch.zeros(30)])
    averager = DCTAverager(model, density=0.02, period=2)
    with WireMeter() as meter:
        for _ in range(4):
            averager.average_parameters()
        sent = meter.take()
    flag = all_reduce_bytes(8, 2)  # reports whether all weights are finite
    assert sent == 2 * (averager.wire_bytes + flag)
    assert averager.wire_bytes == payload_layout(5030, 126, torch.bfloat16).nbytes


@on_ranks(2)
def test_post_local_sgd_optimizer_accepts_the_averager(rank):
    model, plain = uneven(), uneven()
    averager, other = (DCTAverager(m, density=0.1, period=2) for m in (model, plain))
    wrapped, optimizer = PostLocalSGDOptimizer(adamw(model), averager), adamw(plain)
    for step in range(6):
        train_step(model, wrapped, *batch(step, rank, 32))
        train(plain, optimizer, other, rank, [step])
    assert torch.equal(weights(model), weights(plain))


@on_ranks(2)
def test_step_skipped_on_one_rank_counts_as_no_change(rank):
    model = nn.Linear(300, 1, bias=False)
    averager = DCTAverager(model, density=1, period=1, format=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = weights(model)
    loss = model(torch.ones(1, 300)).sum()
    scaler.scale(loss * torch.inf if rank else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights(model), before) == (rank == 1)
    averager.average_parameters()
    assert torch.equal(weights(model), before + ((before - 1) - before) / 2)
    (saved,) = entry(averager.state_dict())["parameters"].values()
    assert not saved["residual"].any()


@on_ranks(2)
def test_stats_count_steps_since_the_last_averaging(rank):
    model = uneven()
    averager = DCTAverager(model, period=3)
    optimizer, seen = adamw(model), []
    for step in range(6):
        train(model, optimizer, averager, rank, [step])
        seen.append(averager.stats()["unaveraged"])
    assert seen == [1, 2, 0, 1, 2, 0]
    train(model, optimizer, averager, rank, [6])
    saved = averager.state_dict()
    assert entry(saved)["unaveraged"] == averager.stats()["unaveraged"] == seen[-1] + 1
    averager.flush()
    assert averager.stats()["unaveraged"] == entry(averager.state_dict())["unaveraged"] == 0
    averager.load_state_dict(saved)
    assert averager.stats()["unaveraged"] == seen[-1] + 1
