"""DCTState: plan, statistics, warnings and invalid calls."""

import io
import logging
import re
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_kernels import backend_of, payload_info
from dct_parallel import DCTState, dct_hook
from dct_parallel.exchange.results import ExchangeResult, RecentStats
from support.entry_points import Hook, Sharded
from support.ranks import Dictated, ddp, entry, hooked, integers, mlp, on_ranks, train

SIZES = (2000, 30, 5000)


def _make(density=0.3, **kwargs):
    model, state = hooked(ddp(mlp()), density=density, **kwargs)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.05)


@on_ranks(2)
def test_plan_and_stats_report_bytes_per_step(rank):
    model, state, optimizer = _make(density=0.01)
    before = state.plan()
    train(model, optimizer, rank, range(6))
    after, stats = state.plan(), state.stats()
    assert "buckets: 1," in before and "transport: all_gather (up to 8 ranks)" in before
    assert "\n0: 0.weight ... 8.bias  " in before and re.search("buckets: [2-9],", after)
    assert "One bucket is assumed" in before and "assumed" not in after
    rows = {line.split()[0]: line.split() for line in after.splitlines()}
    # 1.25 * 0.01 * 8320 = 104 entries of 2 + 2 bytes, and 80 bytes of header and padded starts.
    assert re.search(r"^1: 2.bias ... 0.weight +4 +8,320 +104 +496$", after, re.M), after
    assert rows["total"] == ["total", "10", "16,705", f"{stats['wire_bytes']:,}"]
    assert rows["float32"][-1] == f"{16_705 * 4:,}"
    assert f"{16_705 * 4 / stats['wire_bytes']:.1f}x fewer bytes" in after
    assert stats["step"] == 6 and 0.009 < stats["density"] <= 0.0127
    assert 0 <= stats["overflow"] <= 1


@on_ranks(2)
def test_the_log_explains_dense_steps_transports_and_skipped_steps(rank):
    lines, logger = io.StringIO(), logging.getLogger("dct")
    logger.addHandler(logging.StreamHandler(lines))
    logger.setLevel(logging.INFO)
    model, scaler = ddp(Dictated(SIZES)), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, state = hooked(model, density=0.05, grad_scaler=scaler, optimizer=optimizer)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(*integers(SIZES, step, rank))).backward()
        model.module.p[0].grad[0] = torch.inf if step == 3 else 0
        scaler.step(optimizer)
        scaler.update()
    state.stats()
    how = f"all_gather (up to 8 ranks), backend {backend_of('cpu')}"
    found = lines.getvalue().splitlines()
    assert found == [
        "DCTState: steps 0 to 1 are dense (bfloat16)",
        f"DCTState: bucket p.2 ... p.0 of 7,030 elements: {how}",
        "DCTState: step 3 was skipped by the GradScaler",
    ]


@on_ranks(2)
def test_parameter_stats_match_payloads_and_residuals(rank):
    model, state, optimizer = _make(density=0.05)
    assert state.parameter_stats() == {}
    train(model, optimizer, rank, range(8))
    stats = state.parameter_stats()
    residuals = {name: p["residual"] for name, p in entry(state.state_dict())["parameters"].items()}
    capacities = [plan.capacity for plan in state._buckets.plans()]
    sent = [
        sum(round(stats[name]["density"] * residuals[name].numel()) for name in plan.names)
        for plan in state._buckets.plans()
    ]
    headers = [payload_info(b.codec.payload).count for b in state._buckets.in_order()]
    assert sent == headers and all(map(int.__le__, sent, capacities))
    for bucket in state._buckets.in_order():
        thresholds = {stats[name]["threshold"] for name in bucket.plan.names}
        assert thresholds == {bucket.codec.threshold.item()} and min(thresholds) > 0
    for name, figures in stats.items():
        assert list(figures) == ["density", "threshold", "residual_norm"]
        assert figures["residual_norm"] == pytest.approx(residuals[name].norm().item(), rel=1e-5)
    assert len({figures["density"] for figures in stats.values()}) > 3
    state.load_state_dict(state.state_dict())
    assert state.parameter_stats() == {}
    assert stats.keys() == residuals.keys()


def test_frequent_overflow_warns_once():
    def step(overflowed):
        return [ExchangeResult([], False, [1], 100, overflowed, 4)]

    history = RecentStats()
    for number in range(300):
        history.add(number, step(1))
    assert history.overflow == 0.25
    history = RecentStats()
    with pytest.warns(UserWarning, match="51% of the payloads of the last 100 steps") as caught:
        for number in range(300):
            history.add(number, step(4 * (number % 100 < 51)))
    assert len(caught) == 1
    assert history.density == pytest.approx(0.01)


@on_ranks(2)
def test_state_of_a_different_ddp_raises(rank):
    model, other = ddp(Dictated(SIZES)), ddp(Dictated(SIZES))
    other.register_comm_hook(DCTState(model), dct_hook)
    with pytest.raises(ValueError, match="state must be made from the DDP that the hook is"):
        other(*integers(SIZES, 0, rank)).backward()


@on_ranks(1)
def test_hook_without_a_state_raises(rank):
    for wrong, name in ((None, "None"), ({"step": 0}, "dict")):
        model = ddp(Dictated(SIZES))
        model.register_comm_hook(wrong, dct_hook)
        text = rf"state must be a DCTState, as in ddp.register_comm_hook\(.*\), got {name}$"
        with pytest.raises(TypeError, match=text):
            model(*integers(SIZES, 0, rank)).backward()


@on_ranks(1)
def test_unregistered_state_warns_after_the_first_gradients(rank):
    model = ddp(Dictated(SIZES))
    state = DCTState(model)
    assert state.stats()["step"] == 0  # no warning before training
    model(*integers(SIZES, 0, rank)).backward()
    with pytest.warns(UserWarning, match=r"no hook is registered .*: call ddp.register_comm"):
        state.stats()
    assert state.stats()["wire_bytes"] is None  # warns only once
    late = DCTState(model)
    model.register_comm_hook(late, dct_hook)
    late.state_dict()
    second = DCTState(model)  # is not the registered state
    with pytest.warns(UserWarning, match=r"no hook is registered .* for this state"):
        second.stats()
    copy = deepcopy(model)  # DDP copies `_comm_hooks`, but the copy's reducer has no hook
    of_copy = DCTState(copy)
    copy(*integers(SIZES, 0, rank)).backward()
    with pytest.warns(UserWarning, match=r"no hook is registered .*: call ddp.register_comm"):
        of_copy.stats()


@pytest.mark.parametrize("make", [Hook, partial(Sharded, mesh=(1, 1))])
@on_ranks(1)
def test_wire_bytes_are_none_until_a_step_is_compressed(rank, make):
    """After a load, wire_bytes is None again until the next compressed step."""
    point, numbers = make(SIZES, density=0.05, start_step=1), torch.ones(sum(SIZES))
    for expected in (None, None, 0):
        assert point.state.stats()["wire_bytes"] == expected
        point.step(numbers)
    assert "fewer bytes" not in point.state.plan()  # one rank sends nothing
    point.load(point.file())
    for expected in (None, 0):
        assert point.state.stats()["wire_bytes"] == expected
        point.step(numbers)


@on_ranks(2)
def test_sparse_gradients_raise(rank):
    model = DDP(nn.EmbeddingBag(100, 16, sparse=True))
    with pytest.raises(ValueError, match=r"gradients of ddp must be dense .*, got sparse ones"):
        DCTState(model)
