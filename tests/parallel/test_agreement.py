"""Comparisons between ranks: if ranks differ, they raise errors and do not hang."""

import re
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import SGD

from dct_parallel import DCTAverager, DCTState, groups
from dct_parallel.groups import PeerError, gather_values, require_same, sharing_errors
from support.entry_points import Hook, LocalSteps, NodeMesh, Sharded
from support.ranks import assert_same, ddp, mlp, on_ranks, shorten_timeouts

SIZES, NUMBERS = [5000], torch.ones(5000)
MUST = "must be the same on every rank, got"
REFUSAL = "dct::test: every rank must take part, got ValueError from rank 1: wrong here"


@on_ranks(3)
def test_every_rank_names_different_settings(rank):
    """If ranks differ in a setting, all ranks raise the same error. Training works afterwards."""
    last = rank == 2

    def refused(name, others, value, module, **settings):
        with pytest.raises(ValueError) as error:
            DCTState(ddp(module), **settings)
        text = re.sub("shapes [0-9a-f]{12} on", "shapes X on", str(error.value))
        got = f"{others} on rank 0, {others} on rank 1, {value} on rank 2"
        assert text == f"dct::DCTState: {name} {MUST} {got}"

    for key, value, other, *texts in [
        ("density", 0.1, 0.10001, "0.1", "0.10001"),
        ("format", torch.bfloat16, torch.float32, "bfloat16", "float32"),
        ("refresh_every", 1, 999, "1", "999"),
        ("start_step", 2, 4, "2", "4"),
    ]:
        refused(key, *texts, mlp(), **{"density": 0.1, key: other if last else value})
    module = mlp()
    scaled = {"grad_scaler": torch.amp.GradScaler("cpu"), "optimizer": SGD(module.parameters())}
    refused("grad_scaler", "none", "given", module, **(scaled if last else {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "__version__", "9.9" if last else "9.8")
        refused("version", "9.8", "9.9", mlp())
    model = "2 parameters of 20 elements, names and shapes X"
    refused("model", model, model, nn.ModuleDict({"b" if last else "a": nn.Linear(4, 4)}))
    Hook(SIZES, density=0.1).step(NUMBERS)


@on_ranks(2)
def test_ranks_compare_steps_set_by_post_local_sgd(rank):
    """Loading the state of PostLocalSGDOptimizer sets the averager's step."""
    model = nn.Linear(16, 4)
    averager = DCTAverager(model, period=2)
    optimizer = PostLocalSGDOptimizer(SGD(model.parameters(), lr=0.1), averager)
    saved = optimizer.state_dict()
    for steps, error in (((40, 40), None), ((6, 8), "6 on rank 0, 8 on rank 1")):
        optimizer.load_state_dict({**saved, "step": steps[rank]})
        assert averager.step == steps[rank]
        optimizer.step()
        if error is None:
            optimizer.step()
            assert averager.step == steps[rank] + 2
            averager.step = 20  # the statistics stay
            assert averager.stats()["density"] == 1
            assert_same(torch.cat([p.flatten() for p in model.parameters()]))
            continue
        with pytest.raises(ValueError, match=f"dct::average_parameters: step {MUST} {error}"):
            optimizer.step()
    with pytest.raises(TypeError, match="dct::DCTAverager: step must be an integer"):
        averager.step = 2.0
    with pytest.raises(ValueError, match="dct::DCTAverager: step must be in "):
        averager.step = -1


@on_ranks(2)
def test_flush_on_one_rank_raises_at_the_timeout(rank):
    run = LocalSteps(SIZES, density=0.1)
    run.state.flush()
    shorten_timeouts(1)
    if rank == 0:
        rule = "dct::flush: every rank must do the same within 1 s, got nothing from rank 1"
        with pytest.raises(PeerError, match=rule):
            run.state.flush()


@pytest.mark.parametrize("point", [Hook, LocalSteps, partial(Sharded, mesh=(2, 1))])
@on_ranks(2)
def test_load_on_one_rank_fails_every_rank_at_the_timeout(rank, point):
    """Only rank 0 loads a state during training, so only rank 1 starts the step's collective."""
    training = point(SIZES, start_step=0, density=0.1)
    training.step(NUMBERS)
    saved = training.state.state_dict()
    shorten_timeouts(1)
    if rank == 0:
        training.state.load_state_dict(saved)
        text = "dct::(dct_hook|dct_fully_shard_hook|average_parameters): every rank must do the "
        text += "same within 1 s, got nothing from rank 1"
    else:
        text = r"(?i)timed? ?out|closed by peer|reset by peer"
    with pytest.raises(RuntimeError, match=text):
        training.step(NUMBERS)


def _exchange(values, seconds=100, op="test", group=None):
    return gather_values(op, values, group or dist.group.WORLD, timedelta(seconds=seconds))


@on_ranks(3)
def test_consecutive_exchanges_do_not_mix(rank):
    """Exchanges in the default group alternate with exchanges in subgroups. Rank 2 is late."""
    pairs = [(ranks, dist.new_group(ranks)) for ranks in ([0, 2], [1, 2])]
    for attempt in range(3):
        time.sleep(0.1 * (rank == 2))
        for ranks, group in [([0, 1, 2], None), *pairs]:
            if rank in ranks:
                found = _exchange({"attempt": attempt, "from": rank}, group=group)
                assert found == {r: {"attempt": attempt, "from": r} for r in ranks}
                assert list(found) == ranks


@on_ranks(3)
def test_next_exchange_works_after_all_ranks_fail(rank):
    op = ("this", "that", "that")[rank]
    ops = "this on rank 0, that on rank 1, that on rank 2"
    for attempt in range(3):
        with pytest.raises(ValueError), sharing_errors("test", dist.group.WORLD):
            raise ValueError("wrong here")
        assert _exchange({"x": attempt}) == {r: {"x": attempt} for r in range(3)}
        with pytest.raises(ValueError) as error:
            _exchange({}, op=op)
        assert str(error.value) == f"dct::{op}: every rank must do the same, got {ops}"
        with pytest.raises(ValueError, match=f"dct::test: x {MUST} 0 on rank 0, 0 on rank 1, 1 on"):
            require_same("test", _exchange({"same": 1, "x": rank // 2}))


@on_ranks(3)
def test_error_reaches_ranks_of_other_groups(rank):
    """Rank 2 receives rank 1's error through rank 0, because rank 2's group lacks rank 1."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
    with pytest.raises((PeerError, ValueError)) as error:
        if rank == 2:
            _exchange({}, group=second)
        with sharing_errors("test", None, "not a group", first if rank == 1 else second):
            if rank == 1:
                raise ValueError("wrong here")
            _exchange({}, group=first)
    assert str(error.value) == ("wrong here" if rank == 1 else REFUSAL)


@on_ranks(3)
def test_missing_ranks_raise_at_the_timeout(rank):
    """Ranks that come after the timeout also raise. The next exchange works.

    Missing ranks cause a timeout. The message contains an error of a missing rank.
    """
    store = dist.group.WORLD.get_group_store()
    if rank > 0:
        store.wait(["gave up"])
    with pytest.raises(PeerError) as error:
        _exchange({}, seconds=0.5 if rank == 0 else 100)
    got = "got nothing from ranks 1, 2: see the output there"
    assert str(error.value) == f"dct::test: every rank must do the same within 0.5 s, {got}"
    store.set("gave up", "")
    assert _exchange({"x": rank}) == {r: {"x": r} for r in range(3)}
    group = dist.new_group()
    if rank == 1:
        with pytest.raises(ValueError), sharing_errors("test", group):
            raise ValueError("wrong here")
    elif rank == 0:
        with pytest.raises(PeerError, match=f"^{REFUSAL}$"):
            _exchange({}, seconds=0.5, group=group)


@on_ranks(3)
def test_a_rank_that_gives_up_after_all_have_arrived_agrees(rank):
    """Rank 1 first looks at the counter when rank 0 has given up, too late."""
    world, give_up, add = dist.group.WORLD.get_group_store(), groups._give_up, dist.PrefixStore.add

    def late(store, *args):
        world.set("late", "")
        while add(store, "arrived", 0) < 3:
            time.sleep(0.01)
        give_up(store, *args)
        world.set("gave up", "")

    def looks_late(store, key, amount):
        if (key, amount, rank) == ("arrived", 0, 1):
            world.wait(["gave up"])
        return add(store, key, amount)

    groups._give_up, dist.PrefixStore.add = late, looks_late
    if rank > 0:
        world.wait(["late"])
    found = [_exchange({"x": rank}, seconds) for seconds in (0 if rank == 0 else 100, 100)]
    assert found == 2 * [{r: {"x": r} for r in range(3)}]


@pytest.mark.parametrize("make", [Hook, partial(Sharded, mesh=(2, 1))])
@on_ranks(2)
def test_take_back_changes_all_ranks_or_none(rank, make):
    """Ranks are at different steps in the first call. One rank makes the second call too late."""
    point = make(SIZES, density=0.1, start_step=0)
    for _ in range(2):
        point.step(NUMBERS)
    ledger, before = point.state._ledger, point.pending()
    ledger.step += rank
    text = "dct::take_back: step must be the same on every rank, got 2 on rank 0, 3 on rank 1"
    with pytest.raises(ValueError, match=text):
        point.state.take_back()
    ledger.step -= rank
    assert torch.equal(point.pending(), before)
    shorten_timeouts(1)
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["gave up"])  # comes after the timeout of rank 0
    text = "dct::take_back: every rank must do the same within 1 s, got nothing from rank 1"
    with pytest.raises(RuntimeError, match=text):
        point.state.take_back()
    store.set("gave up", "")
    shorten_timeouts(60)
    assert torch.equal(point.pending(), before)
    point.state.take_back()
    assert not torch.equal(point.pending(), before)


@pytest.mark.parametrize(
    "make, name",
    [
        (Hook, "dct_parallel.exchange.transport.all_gather"),
        (Hook, "torch.distributed.all_to_all_single"),
        (NodeMesh, "dct_parallel.exchange.transport.all_gather"),
        (NodeMesh, "dct_parallel.ddp.node.reduce_scatter"),
        (partial(Sharded, mesh=(2, 1)), "dct_parallel.exchange.transport.all_gather"),
        (partial(Sharded, mesh=(2, 1)), "torch.distributed.all_to_all_single"),
    ],
)
@on_ranks(2)
def test_failed_exchange_raises_in_every_later_call(rank, make, name):
    """The exchange fails before or after packing. The state lacks the entries of that step."""

    def fails(*args, **options):
        raise ConnectionError

    by = "reduce_scatter" if name.endswith("single") else "all_gather"
    text = "every payload of step 1 must be intact, got a failed exchange in bucket 0"
    for first in ("state_dict", "plan", "load_state_dict"):
        point = make([40_000], density=0.1, start_step=0, transport=by)
        point.step(torch.arange(40_000.0))
        state, saved = point.state, point.state.state_dict()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(name, fails)
            with pytest.raises((ConnectionError, RuntimeError)):
                point.step(torch.arange(40_000.0))
        for call in (first, "load_state_dict", "take_back", "stats", "plan", "state_dict", "close"):
            with pytest.raises(RuntimeError, match=text):
                getattr(state, call)(*[saved] * (call == "load_state_dict"))
