"""DCTAverager: steps that only a rank's own weights have are counted, and told where it matters."""

import gc
import warnings

import pytest
import torch
from torch import nn

from averaged import adamw, train, uneven
from dct_parallel import DCTAverager
from ranks import entry, on_ranks


@on_ranks(2)
def test_steps_since_the_last_averaging_are_counted(rank):
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


def _stepped(steps=2, **settings):
    model = nn.Linear(3, 1)
    model(torch.ones(1, 3)).sum().backward()
    averager = DCTAverager(model, **{"period": 3} | settings)
    for _ in range(steps):
        averager.average_parameters()
    return averager


def test_the_end_of_a_run_tells_of_steps_that_were_not_averaged(one_rank):
    averager = _stepped()
    with pytest.warns(UserWarning, match="the run's last 2 steps were not averaged, .*flush"):
        del averager
        gc.collect()


@on_ranks(2)
def test_the_end_of_a_run_tells_of_residuals_that_only_this_ranks_weights_have(rank):
    averager = _stepped(period=1, step_ahead=True)
    assert averager.stats()["unaveraged"] == 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del averager
        gc.collect()
    text = "DCT: the residuals were not averaged, so weights differ between ranks"
    assert [str(warning.message)[: len(text)] for warning in told] == [text] * (rank == 0)


@on_ranks(2)
def test_where_steps_are_averaged_or_saved_or_none_are_left_it_is_silent(rank):
    ahead, whole = {"period": 1, "step_ahead": True}, {"density": 1, "format": "float32"}
    for end, settings in (
        *(("flush", {}), ("state_dict", {}), ("average_parameters", {})),
        *(("flush", ahead), ("state_dict", ahead), ("plan", ahead | whole)),
    ):
        averager = _stepped(**settings)
        getattr(averager, end)()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del averager
            gc.collect()


@pytest.mark.parametrize("call", ["stats", "state_dict", "flush", "__del__"])
def test_an_averager_that_is_never_called_is_told_once(one_rank, call):
    averager = _stepped(0)
    with pytest.warns(UserWarning, match=r"average_parameters\(\) was never called") as told:
        if call == "__del__":
            del averager
            gc.collect()
        else:
            getattr(averager, call)()
            averager.stats()
            del averager
            gc.collect()
    assert len(told) == 1


def test_before_a_backward_pass_nothing_is_told(one_rank):
    averager = DCTAverager(nn.Linear(3, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averager.state_dict()
        averager.flush()
        stats = averager.stats()
    assert stats["density"] is None and stats["overflow"] is None
