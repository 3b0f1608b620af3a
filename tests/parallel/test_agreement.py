"""Ranks that differ, or of which some are missing: every rank that can tell says so, none hangs."""

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from dct_parallel import DCTAverager, DCTState, dct_fully_shard_hook
from dct_parallel import groups as agreement_module
from dct_parallel.exchange import ledger as ledger_module
from dct_parallel.groups import PeerError, _Round, exchange, refusing, separate_group
from ranks import (
    batch,
    ddp,
    entry,
    hooked,
    mlp,
    on_ranks,
    set_timeout,
    shard_mesh,
    shorten_timeouts,
    train,
    train_step,
)

MUST = "must be the same on every rank, got"


@on_ranks(3)
def test_settings_that_differ_are_named_by_every_rank(rank):
    """Every setting that must be equal, one after another; then all go on."""
    last, model = rank == 2, "2 parameters of 20 elements, names and shapes X"

    def refused(name, told, other, make):
        with pytest.raises(ValueError) as error:
            make()
        text = re.sub("shapes [0-9a-f]{12} on", "shapes X on", str(error.value))
        assert text == f"dct::DCTState: {name} {MUST} {told} on rank 0, {told} on rank 1, {other}"

    for key, value, other, told, others in [
        ("density", 0.1, 0.10001, "0.1", "0.10001"),
        ("format", torch.bfloat16, torch.float32, "bfloat16", "float32"),
        ("policy", "fresh", "fixed", "fresh", "fixed"),
        ("refresh_every", 1000, 999, "1000", "999"),
        ("start_step", 2, 4, "2", "4"),
        ("grad_scaler", None, torch.amp.GradScaler("cpu"), "none", "given"),
    ]:
        settings = {"density": 0.1, key: other if last else value}
        refused(
            key, told, f"{others} on rank 2", lambda given=settings: DCTState(ddp(mlp()), **given)
        )
    version = ledger_module.__version__
    ledger_module.__version__ = "9.9" if last else version
    refused("version", version, "9.9 on rank 2", lambda: DCTState(ddp(mlp())))
    ledger_module.__version__ = version
    layers = nn.ModuleDict({"b" if last else "a": nn.Linear(4, 4)})
    refused("model", model, f"{model} on rank 2", lambda: DCTState(ddp(layers)))
    trained, _ = hooked(ddp(mlp()), density=0.1)
    train(trained, torch.optim.SGD(trained.parameters(), lr=0.05), rank, range(4))


def _trained(rank, steps, group=None):
    model, state = hooked(ddp(mlp()), density=0.1, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, rank, range(steps))
    return model, state, lambda: train_step(model, optimizer, *batch(steps, rank))


@on_ranks(2)
def test_loads_that_differ_are_named_by_every_rank(rank):
    """Checkpoints that differ between ranks, and one that only rank 0 loads, before training."""
    _, state, step = _trained(rank, 3)
    at_3 = state.state_dict()
    step()
    at_4 = state.state_dict()
    _, other, _ = _trained(rank, 3)
    other_run = other.state_dict()
    ids = [entry(saved)["run_id"] for saved in (at_3, other_run)]
    assert ids[0] != ids[1]
    for first, second, rule in [
        (at_3, None, f"checkpoint {MUST} one of 2 ranks on rank 0, none on rank 1"),
        (at_3, at_4, f"step {MUST} 3 on rank 0, 4 on rank 1"),
        (at_3, other_run, f"run_id {MUST} {ids[0]} on rank 0, {ids[1]} on rank 1"),
    ]:
        _, state, step = _trained(rank, 0)
        if (first, second)[rank] is not None:
            state.load_state_dict((first, second)[rank])
        with pytest.raises(ValueError) as error:
            step()
        assert str(error.value) == f"dct::load_state_dict: {rule}"


def _hooked():
    _, state, step = _trained(dist.get_rank(), 4)
    return state, step


def _averaged():
    model = mlp()
    averager = DCTAverager(model, period=1)
    averager.average_parameters()
    return averager, averager.average_parameters


def _sharded():
    mesh = shard_mesh(2, 1)
    model = fully_shard(mlp(), mesh=mesh["shard"])
    state = dct_fully_shard_hook(model, mesh=mesh, density=0.1)

    def step():
        model(torch.ones(2, 64)).sum().backward()

    step()
    return state, step


@pytest.mark.parametrize("make", [_hooked, _averaged, _sharded])
@on_ranks(2)
def test_if_one_rank_loads_alone_every_rank_fails_at_the_timeout(rank, make):
    """In the middle of training only rank 0 loads: rank 1 is in a collective by then."""
    state, step = make()
    shorten_timeouts(1)
    if rank == 0:
        state.load_state_dict(state.state_dict())
        text = "every rank must do the same within 1 s, got nothing from rank 1"
    else:
        if make is _sharded:
            state.state_dict()  # a collective
        text = r"(?i)timed? ?out|closed by peer|reset by peer"
    with pytest.raises(RuntimeError, match=text):
        step()


@on_ranks(2)
def test_a_rank_that_loads_late_is_waited_for(rank):
    """One rank's file takes long to read: not as long as the timeout, by the others' clock."""
    set_timeout(100)
    state, step = _hooked()
    saved = state.state_dict()
    if rank == 1:
        time.sleep(0.5)
    else:
        clock = time.monotonic
        agreement_module.time.monotonic = lambda: 50 * clock()
    state.load_state_dict(saved)
    step()
    assert entry(state.state_dict())["step"] == 5


@on_ranks(2)
def test_a_peer_that_is_stopped_is_an_error_at_the_timeout_of_all_ranks(rank):
    """Rank 1 is stopped before its last step. Nodes' timeouts are in test_hierarchy."""
    set_timeout(3)
    _, _, step = _trained(rank, 4)
    store = _store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        store.wait(["gave up"])
        return
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out|closed by peer|reset by peer"):
        step()
    store.set("gave up", "")
    os.kill(int(store.get("pid")), signal.SIGCONT)


@on_ranks(2)
def test_a_host_of_the_store_that_is_stopped_is_an_error_at_the_timeout(rank):
    """Rank 0, which hosts it: torch's own calls of the store would wait for ever."""
    told = _store()
    dist.destroy_process_group()
    if rank == 0:
        hosted = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        told.set("port", str(hosted.port))
    else:
        hosted = dist.TCPStore("127.0.0.1", int(told.get("port")), 2)
    timeout = timedelta(seconds=1)
    dist.init_process_group("gloo", store=hosted, rank=rank, world_size=2, timeout=timeout)
    dist.barrier()
    if rank == 0:
        told.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    host = int(told.get("pid"))
    while "T" not in Path(f"/proc/{host}/stat").read_text().rpartition(")")[2]:
        time.sleep(0.01)
    with pytest.raises(PeerError, match="must do the same within 1 s, got no answer: the host"):
        DCTAverager(mlp())
    with pytest.raises(RuntimeError, match="must make a process group within 1 s, got no answer"):
        separate_group(dist.group.WORLD, "a test", timeout)
    os.kill(host, signal.SIGCONT)


# What the ranks of a group tell each other, and what becomes of it if one of them fails.


def _store():
    return dist.distributed_c10d._get_default_store()


def _agree(values, seconds=100, op="a test"):
    return exchange(op, values, dist.group.WORLD, timedelta(seconds=seconds))


def _refuse(text):
    with pytest.raises(ValueError, match=text), refusing("a test", dist.group.WORLD):
        raise ValueError(text)


def _all_agree(attempt):
    """Every rank takes part with its own values of this attempt, and hears everyone's."""
    told = _agree({"attempt": attempt, "from": dist.get_rank()})
    assert told == {rank: {"attempt": attempt, "from": rank} for rank in told}
    assert list(told) == list(range(dist.get_world_size()))


def _none_agree(reason):
    """A retry raises at once, on every rank, however often."""
    for _ in range(2):
        with pytest.raises(PeerError, match=f"{reason}; restart the process on every rank"):
            _agree({"attempt": "retry"})


REFUSAL = "dct::a test: every rank must take part, got ValueError from rank 1: wrong here"


@on_ranks(3)
def test_a_refusal_is_heard_at_once_and_a_retry_is_refused(rank):
    """Rank 1 refuses. Rank 2 comes after all others have heard of it."""
    _all_agree("before")
    if rank == 1:
        _refuse("wrong here")
    else:
        if rank == 2:
            _store().wait(["0 heard", "1 heard"])
        with pytest.raises(PeerError, match=f"^{REFUSAL}"):
            _agree({"attempt": "refused"})
    _store().set(f"{rank} heard", "")
    _none_agree(REFUSAL)


@on_ranks(3)
def test_where_not_all_refuse_a_retry_is_refused(rank):
    if rank != 0:
        _refuse("wrong here")
    else:
        with pytest.raises(PeerError, match=r"got ValueError from rank [12]: wrong here$"):
            _agree({})
    _none_agree(r"got ValueError from rank [12]: wrong here")


@on_ranks(3)
def test_where_all_fail_alike_the_next_attempt_succeeds(rank):
    """A wrong argument in a notebook: nobody waits, and the next attempt is as if it were first."""
    for attempt in range(3):
        _refuse("wrong here")
        _all_agree(attempt)
        with pytest.raises(ValueError, match="do the same, got this on rank 0, that on rank 1"):
            _agree({}, op=("this", "that", "that")[rank])


@on_ranks(3)
def test_an_interrupted_wait_ends_the_others_waits(rank):
    """Nobody waits half an hour for a rank that is known to be lost: they press Ctrl-C."""
    reason = "every rank must take part, got KeyboardInterrupt from rank 0"
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            _agree({"attempt": "interrupted"})
    elif rank == 1:
        with pytest.raises(PeerError, match=reason):
            _agree({"attempt": "interrupted"})
        _store().set("heard", "")
    else:
        _store().wait(["heard"])
    _none_agree(reason)


@on_ranks(2)
def test_a_rank_that_told_its_values_is_not_missing(rank):
    """Rank 1 has told its values and is stopped before it counts itself: nobody is missing."""
    if rank == 1:
        told = _Round("a test", dist.group.WORLD)
        told._store.set(told._own, '{"op": "a test", "values": {"from": 1}}')
        _store().wait(["0 agreed"])
        return
    heard = _agree({"from": 0}, seconds=1)
    assert heard == {0: {"from": 0}, 1: {"from": 1}}
    _store().set("0 agreed", "")
