"""DCTAverager: non-finite weights, overflows and failed exchanges raise; other changes are kept."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dct_parallel import DCTAverager
from dct_parallel.groups import PeerError
from support.ranks import assert_same, entry, gathered, on_ranks, run_ranks, weights


@on_ranks(2)
def test_nonfinite_weights_raise_on_every_rank(rank):
    """Sums are exact because changes are multiples of 1/8. The third averaging raises."""
    model = nn.ParameterList([torch.zeros(5000), torch.zeros(70)])
    options = {"format": "bfloat16", "transport": "reduce_scatter", "step_ahead": True}
    averager = DCTAverager(model, density=0.05, period=2, **options)
    generator = torch.Generator().manual_seed(rank)
    moved = torch.zeros(5070, dtype=torch.float64)
    for step in range(1, 17):
        move = torch.randint(-8, 9, (5070,), generator=generator) / 8.0
        move[7] = 0  # a change here would be lost, because this weight becomes NaN
        moved += move
        with torch.no_grad():
            for parameter, part in zip(model, move.split([5000, 70]), strict=True):
                parameter += part
            if step == 6 and rank == 1:
                model[0][7] = torch.nan
        base = averager._base.clone()
        if step == 6:
            text = "dct::average_parameters: weights at averaging 3 must be finite on every rank, "
            text += "got NaN or Inf " + ("on another rank", "in 0")[rank]
            with pytest.raises(RuntimeError, match=text):
                averager.average_parameters()
            assert torch.equal(averager._base, base)
            assert torch.equal(weights(model), base + averager._bucket.codec.residual)
        else:
            averager.average_parameters()
        assert_same(averager._base)
    assert averager._base.count_nonzero() > 1000
    averager.flush()
    assert_same(weights(model))
    assert torch.equal(2 * weights(model).double(), sum(gathered(moved)))


def _killed(rank, folder, transport):
    """Rank 1 is killed before the second averaging. On the other ranks, two averagings fail."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = nn.ParameterList([torch.zeros(3000)])
    options = {"format": torch.float32, "transport": transport, "process_group": group}
    averager = DCTAverager(model, density=0.05, period=3, **options)
    generator = torch.Generator().manual_seed(rank)
    errors = []
    while averager.step < 9:
        if averager.step == 3:
            moved = torch.zeros(3000)  # changes since the last successful averaging
            before = entry(averager.state_dict())
        if averager.step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        move = torch.randint(-8, 9, (3000,), generator=generator) * 0.375  # exact when divided by 3
        with torch.no_grad():
            model[0] += move
        moved = move if averager.step == 0 else moved + move
        try:
            averager.average_parameters()
        except RuntimeError as error:
            assert torch.equal(weights(model), averager._base)
            errors.append(error)
    first, second = errors
    torch.save((before, entry(averager.state_dict()), moved), folder / f"{rank}.pt")
    raise second from first


@pytest.mark.parametrize("transport", [None, "reduce_scatter"])
def test_surviving_ranks_raise_and_can_save_their_state(transport, tmp_path):
    rule = r"dct::average_parameters: every rank must call average_parameters after the same step"
    text = rf"exit codes \[1, -9, 1\](.|\n)*{rule}.*(closed|reset) by peer"
    with pytest.raises(RuntimeError, match=text):
        run_ranks(_killed, 3, tmp_path, transport)
    for rank in (0, 2):
        before, after, moved = torch.load(tmp_path / f"{rank}.pt")
        old, new = (saved["parameters"]["0"] for saved in (before, after))
        assert after["step"] == 9
        owners = new.pop("owner_residual")
        assert len(owners) == (transport == "reduce_scatter")
        for owner in owners:
            assert torch.equal(owner, *old["owner_residual"])
            assert (owner.count_nonzero() > 100) == (rank == 0)
        assert new.keys() == {"residual", "base"}
        assert torch.equal(new["base"], old["base"]) and old["base"].count_nonzero() > 100
        assert torch.equal(new["residual"], old["residual"] + moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@on_ranks(2)
def test_overflowing_changes_raise_and_are_dropped(rank, dtype):
    """Sums overflow in float32, or new weights in float16. Other changes are kept."""
    tenths = torch.arange(300.0) / 10
    for format, transport in (
        *(("float32", None), ("bfloat16", "reduce_scatter"), ("int4", "reduce_scatter")),
        *((quantized, None) for quantized in ("int8", "int4", "ternary")),
    ):
        model = nn.ParameterList([torch.zeros(300, dtype=dtype) for _ in "ab"])
        options = {"density": 0.3} if format == "bfloat16" else {"density": 1}
        averager = DCTAverager(model, format=format, transport=transport, period=1, **options)
        with torch.no_grad():
            model[0] += tenths
            if dtype == torch.float32:
                model[1][40] = 2e38
            else:  # the base and the mean change are finite, but their sum overflows in float16
                averager._base[340] = model[1][40] = 60_000.0
                averager._bucket.codec.residual[340] = 6_000.0
                averager._bucket.transport.owned[1][340:341] = 6_000.0  # empty if there is no owner
        base = averager._base.clone()
        text = "averaging 1 must be finite on every rank, .* overflow, in 1$"
        with pytest.raises(RuntimeError, match=text):
            averager.average_parameters()
        assert torch.equal(averager._base, base)
        assert torch.equal(weights(model), base.to(dtype))
        for _ in range(2):
            averager.average_parameters()
        averager.flush()
        assert_same(weights(model))
        torch.testing.assert_close(model[0], tenths.to(dtype), rtol=1e-3, atol=1e-3)
        assert torch.equal(model[1].float(), base[300:]), format


@on_ranks(2)
def test_overflow_is_dropped_if_memory_runs_out(rank):
    """The mean overflows, and there is no memory for the new weights on any rank."""
    model = nn.ParameterList([torch.zeros(300)])
    averager = DCTAverager(model, format="float32", density=1, period=1)
    start, bases = averager._start, []

    def runs_out(base):
        bases.append(base)
        if len(bases) == 2:  # of the mean
            raise MemoryError
        return start(base)

    averager._start = runs_out
    with torch.no_grad():
        model[0] += torch.arange(300.0)
        model[0][40] = 2e38
    with pytest.raises(MemoryError):
        averager.average_parameters()
    averager.average_parameters()
    assert torch.equal(model[0], torch.arange(300.0).index_fill(0, torch.tensor([40]), 0))


@on_ranks(2)
def test_error_in_the_first_comparison_raises_on_every_rank(rank):
    averager = DCTAverager(nn.Linear(4, 4), period=1)
    if rank == 0:
        averager._weights.gradient_digest = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError if rank == 0 else PeerError, match="by zero"):
        averager.average_parameters()


@on_ranks(2)
def test_flush_raises_if_changes_overflow(rank):
    model = nn.ParameterList([torch.full((8,), 60_000.0, dtype=torch.float16)])
    averager = DCTAverager(model)
    averager._bucket.codec.residual[3] = 6_000.0
    with pytest.raises(RuntimeError, match="flush: weights must be finite on every rank"):
        averager.flush()
    assert torch.equal(weights(model), torch.full((8,), 60_000.0, dtype=torch.float16))
    assert averager._base.isfinite().all() and averager._bucket.codec.residual[3] == 6_000
