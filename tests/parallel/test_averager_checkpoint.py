"""DCTAverager: its states, and that a run goes on where it was."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from averaged import adamw, uneven
from dct_parallel import DCTAverager, DCTState, merge_states
from ranks import (
    assert_same,
    assert_same_states,
    batch,
    ddp,
    entry,
    gathered,
    mlp,
    on_ranks,
    through_a_file,
    train_step,
    weights,
)

PERIOD = 3


@on_ranks(2)
def test_a_flush_after_different_loads_is_refused(rank):
    """Rank 0 goes back to an earlier state, rank 1 to a later one."""
    model = nn.ParameterList([torch.zeros(300)])
    averager = DCTAverager(model, density=0.1, period=1)
    states = []
    for _ in range(2):
        with torch.no_grad():
            model[0] += torch.randn(300)
        averager.average_parameters()
        states.append(averager.state_dict())
    averager.load_state_dict(states[rank])
    with pytest.raises(ValueError, match="step must be the same on every rank, got 1 on rank 0, 2"):
        averager.flush()


@on_ranks(2)
def test_resumed_after_any_step_is_undisturbed_bit_for_bit(rank):
    """A run that saves after each step, and those that go on from there, against one that does
    not."""
    for dtype, transport, ahead in (
        (torch.float32, None, False),
        (torch.bfloat16, None, True),
        (torch.float32, "reduce_scatter", True),
        (torch.bfloat16, "reduce_scatter", False),
    ):

        def make(seed, dtype=dtype, transport=transport, ahead=ahead):
            model = uneven(seed).to(dtype)
            options = {"transport": transport, "step_ahead": ahead}
            averager = DCTAverager(model, density=0.1, period=PERIOD, **options)
            return model, adamw(model), averager

        def step(number, model, optimizer, averager, dtype=dtype):
            x, y = batch(number, rank, 32)
            train_step(model, optimizer, x.to(dtype), y.to(dtype))
            averager.average_parameters()

        undisturbed, saving, saved, after = make(rank), make(rank), [], []
        for number in range(3 * PERIOD):
            step(number, *undisturbed)
            step(number, *saving)
            saved.append(through_a_file([part.state_dict() for part in saving]))
            after.append(weights(undisturbed[0]))
            assert torch.equal(weights(saving[0]), after[-1])
        resumed = make(5)
        for stop in range(PERIOD, 2 * PERIOD + 1):
            for part, state in zip(resumed, saved[stop - 1], strict=True):
                part.load_state_dict(state)
            averager = resumed[2]
            assert averager.step == stop
            assert_same_states(averager.state_dict(), saved[stop - 1][2])
            for number in range(stop, 3 * PERIOD):
                step(number, *resumed)
                assert torch.equal(weights(resumed[0]), after[number]), (stop, number)
            assert_same_states(averager.state_dict(), saved[-1][2])


@on_ranks(2)
def test_where_weights_differ_a_state_that_would_move_them_is_refused(rank):
    """They are as far ahead as this rank's residual."""

    def make(**settings):
        model = nn.ParameterList([torch.zeros(20_000), torch.zeros(30_000)])
        options = {"step_ahead": True, "transport": "reduce_scatter"} | settings
        return model, DCTAverager(model, density=0.05, period=1, **options)

    def state_of(model, averager):
        with torch.no_grad():
            torch._foreach_add_(list(model), [torch.randn(p.shape) for p in model])
        averager.average_parameters()
        assert_same(averager._base)
        return averager.state_dict()

    state = state_of(*make())
    both = [None, None]
    dist.all_gather_object(both, state)
    for settings, other, text in (
        ({"transport": "all_gather"}, state, "transport must be reduce_scatter, as in the saved"),
        ({"step_ahead": False}, state, "step_ahead must be False, as in this run, got True"),
        ({}, merge_states(both), f"state must be rank {rank}'s own with step_ahead"),
    ):
        _, averager = make(**settings)
        with pytest.raises(ValueError, match=f"load_state_dict: {text}"):
            averager.load_state_dict(other)
        assert averager.step == 0 and not averager._base.any()
    _, averager = make()
    averager.load_state_dict(state_of(*make(transport="all_gather")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_a_state_saved_after_an_averaging_brings_weights_that_are_ahead(rank, dtype):
    """A rank may have been given others: rank 0's, by a file or as the averager was made."""

    def make():
        model = uneven(5).to(dtype)
        return model, DCTAverager(model, density=0.1, period=PERIOD, step_ahead=True)

    model, averager = make()
    torch.manual_seed(rank)
    for step in range(2 * PERIOD + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape)
        averager.average_parameters()
        if (step + 1) % PERIOD:
            continue
        state, saved = averager.state_dict(), weights(model)
        other, again = make()
        assert not torch.equal(weights(other), saved)
        again.load_state_dict(state)
        assert torch.equal(weights(other), saved)
        assert not torch.equal(*gathered(saved))
    before = weights(other)
    again.load_state_dict(averager.state_dict())  # a step further: these are for the user to load
    assert torch.equal(weights(other), before)


@on_ranks(1)
def test_a_state_of_a_compiled_module_is_loaded_without_compilation(rank):
    """As torch.compile wraps a module; of the largest period."""
    model = nn.Linear(30, 30)
    averager = DCTAverager(nn.ModuleDict({"_orig_mod": model}), period=2**31 - 1)
    averager.average_parameters()
    again = DCTAverager(model, period=2**31 - 1)
    again.load_state_dict(averager.state_dict())
    assert again.step == 1
    assert list(entry(averager.state_dict())["parameters"]) == ["weight", "bias"]


@on_ranks(2)
def test_ranks_may_be_apart_after_a_load(rank):
    """Local steps after a load may take ranks as long as they do."""
    averager = DCTAverager(uneven(), period=1)
    averager.average_parameters()
    averager.load_state_dict(averager.state_dict())
    time.sleep(0.3 * rank)
    averager.average_parameters()


@on_ranks(2)
def test_other_states_are_refused(rank):
    model = uneven()
    averager = DCTAverager(model, density=0.1)
    other = DCTState(ddp(uneven()), density=0.1)
    with pytest.raises(ValueError, match="state must be a DCTAverager's, got one without a base"):
        averager.load_state_dict(other.state_dict())
    bare = other.state_dict()
    entry(bare)["parameters"].clear()
    text = "state must be a DCTAverager's, got one without a base"
    with pytest.raises(ValueError, match=text):
        averager.load_state_dict(bare)
    with pytest.raises(ValueError, match="state must be a DCTState's, got a DCTAverager's"):
        other.load_state_dict(averager.state_dict())
    with pytest.raises(ValueError, match=r"density must be 0\.1"):
        averager.load_state_dict(DCTAverager(model, density=0.2).state_dict())
    other.close()


@on_ranks(2)
def test_ranks_that_load_different_steps_are_told(rank):
    averager, saved = DCTAverager(mlp(32, 2), density=0.1, period=4), {}
    for step in range(1, 10):
        averager.average_parameters()
        saved[step] = averager.state_dict()
    for steps in (4, 6), (5, 4), (7, 6), (4, 9):
        averager = DCTAverager(mlp(32, 2), density=0.1, period=4)
        averager.load_state_dict(saved[steps[rank]])
        text = f"step must be .* {steps[0]} on rank 0, {steps[1]} on"
        with pytest.raises(ValueError, match=text):
            for _ in range(4):
                averager.average_parameters()
