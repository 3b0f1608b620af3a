"""DCTAverager: averaged weights, equality of ranks, and statistics."""

import torch
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer

from dct_parallel import DCTAverager
from support.averaged import adamw, train, uneven
from support.ranks import batch, entry, on_ranks, train_step, weights


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
