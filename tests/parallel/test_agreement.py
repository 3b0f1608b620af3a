"""Ranks that differ, or of which some are missing: every rank that can tell says so, none hangs."""

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dct_parallel import DCTState, dct_hook
from dct_parallel.data_parallel import state as state_module
from ranks import batch, ddp, entry, mlp, run_ranks, train_step

MUST = "must be the same on every rank, got"


def _disagreeing(rank):
    """Every setting that must be equal, one after another; then all go on."""
    last, texts = rank == dist.get_world_size() - 1, []
    scaler = torch.amp.GradScaler("cpu")
    for key, value, other in [
        ("density", 0.1, 0.10001),
        ("value_dtype", torch.bfloat16, torch.float32),
        ("policy", "tracked", "fixed"),
        ("refresh_every", 1000, 999),
        ("start_step", 2, 4),
        ("grad_scaler", None, scaler),
    ]:
        with pytest.raises(ValueError) as error:
            DCTState(ddp(mlp()), **{"density": 0.1, key: other if last else value})
        texts.append(str(error.value))
    version = state_module.__version__
    state_module.__version__ = "9.9" if last else version
    with pytest.raises(ValueError) as error:
        DCTState(ddp(mlp()))
    texts.append(str(error.value).replace(version, "this one"))
    state_module.__version__ = version
    with pytest.raises(ValueError) as error:
        DCTState(ddp(nn.ModuleDict({"b" if last else "a": nn.Linear(4, 4)})))
    texts.append(re.sub("shapes [0-9a-f]{12} on", "shapes X on", str(error.value)))
    model = ddp(mlp())
    model.register_comm_hook(DCTState(model, 0.1), dct_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        train_step(model, optimizer, *batch(step, rank))
    return texts


def test_settings_that_differ_are_named_by_every_rank():
    texts = run_ranks(_disagreeing, 3)
    model = "2 parameters of 20 elements, names and shapes X"
    assert texts[0] == [
        f"dct::DCTState: {key} {MUST} {value} on rank 0, {value} on rank 1, {other} on rank 2"
        for key, value, other in [
            ("density", 0.1, 0.10001),
            ("value_dtype", "bfloat16", "float32"),
            ("policy", "tracked", "fixed"),
            ("refresh_every", 1000, 999),
            ("start_step", 2, 4),
            ("grad_scaler", "none", "given"),
            ("version", "this one", "9.9"),
            ("model", model, model),
        ]
    ]
    assert texts[1] == texts[2] == texts[0]


def _trained(rank, steps, group=None):
    model = ddp(mlp())
    state = DCTState(model, density=0.1, process_group=group)
    model.register_comm_hook(state, dct_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        train_step(model, optimizer, *batch(step, rank))
    return model, state, lambda: train_step(model, optimizer, *batch(steps, rank))


def _loads(rank):
    """Checkpoints that differ between ranks, and one that only rank 0 loads, before training."""
    _, state, step = _trained(rank, 3)
    at_3 = state.state_dict()
    step()
    at_4 = state.state_dict()
    _, other, _ = _trained(rank, 3)
    other_run = other.state_dict()
    texts = []
    for first, second in [(at_3, None), (at_3, at_4), (at_3, other_run)]:
        _, state, step = _trained(rank, 0)
        if (first, second)[rank] is not None:
            state.load_state_dict((first, second)[rank])
        with pytest.raises(ValueError) as error:
            step()
        texts.append(str(error.value))
    ids = [entry(saved)["run_id"] for saved in (at_3, other_run)]
    assert len(set(ids)) == 2
    return texts, ids


def test_loads_that_differ_are_named_by_every_rank():
    (texts, ids), other = run_ranks(_loads, 2)
    assert other == (texts, ids)
    assert texts == [
        f"dct::load_state_dict: checkpoint {MUST} one of 2 ranks on rank 0, none on rank 1",
        f"dct::load_state_dict: step {MUST} 3 on rank 0, 4 on rank 1",
        f"dct::load_state_dict: run_id {MUST} {ids[0]} on rank 0, {ids[1]} on rank 1",
    ]


def _loads_alone(rank):
    """In the middle of training only rank 0 loads: rank 1 is in a collective by then."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4))
    _, state, step = _trained(rank, 4, group)
    if rank == 0:
        state.load_state_dict(state.state_dict())
        with pytest.raises(RuntimeError, match="every rank must do the same within 4 s") as error:
            step()
        assert "got nothing from rank 1" in str(error.value)
    else:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            step()


def test_who_loads_alone_names_the_others_and_they_end_at_the_timeout():
    run_ranks(_loads_alone, 2)


def _loads_again(rank):
    """All ranks load in the middle of training, one of them late: nothing is wrong."""
    _, state, step = _trained(rank, 4)
    saved = state.state_dict()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 waits"])
    else:
        exchange = state._run._agreement.exchange

        def late(*args):
            store.set("rank 0 waits", "")
            return exchange(*args)

        state._run._agreement.exchange = late
    state.load_state_dict(saved)
    step()
    return entry(state.state_dict())["step"]


def test_all_may_load_in_the_middle_of_training():
    assert run_ranks(_loads_again, 2) == [5, 5]


def _missing(rank):
    """Rank 1 makes no state."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    model = ddp(mlp())
    if rank == 0:
        with pytest.raises(RuntimeError, match="DCTState: every rank must do the same within 1 s"):
            DCTState(model, process_group=group)


def test_a_rank_without_a_state_is_named_at_the_timeout():
    run_ranks(_missing, 2)


def _stalls(rank, how):
    """Rank 1 stalls, or is stopped, before its last step."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4))
    _, _, step = _trained(rank, 4, group)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        store.wait(["given up"])
        return
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        step()
    store.set("given up", "")
    if how == "stopped":
        os.kill(int(store.get("pid")), signal.SIGCONT)


@pytest.mark.parametrize("how", ["stalled", "stopped"])
def test_a_peer_that_is_silent_is_an_error_at_the_timeout_of_the_group(how):
    run_ranks(_stalls, 2, how)
