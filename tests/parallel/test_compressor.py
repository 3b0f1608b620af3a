"""The codecs without a network."""

import math

import pytest
import torch

from dct_kernels import payload_info
from dct_kernels.layout import BLOCK, SCALED
from dct_parallel import Compressor
from dct_parallel.exchange.quantized import Quantized


def grads(numel, seed, scale=1.0):
    return scale * torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def sent_by(compressor):
    """Return the entries of the last payload as a dense tensor."""
    out = torch.empty(compressor.residual.numel())
    assert compressor.unpack(compressor.payload.unsqueeze(0), out).tolist() == [0]
    return out


def largest(values, count):
    """Return the largest magnitude that `count` entries reach."""
    return values.abs().sort().values[-count].item()


def test_threshold_matches_the_accumulated_gradient():
    c = Compressor(64, density=0.25)
    for step in range(50):
        grad = grads(64, step, scale=0.9**step)
        accumulated = c.residual + grad
        c.pack(grad)
        assert c.threshold.tolist() == [largest(accumulated, 16)]
        assert c.seen.tolist() == [16]


def test_threshold_is_sampled_first_and_in_every_refresh_every_th_step():
    c = Compressor(64, density=0.25, refresh_every=7)
    c.step = 3  # as load_state_dict does
    sampled = []
    for step in range(3, 30):
        grad = grads(64, step)
        accumulated, before = c.residual + grad, c.threshold.clone()
        c.pack(grad)
        if not torch.equal(c.threshold, before):
            sampled.append(step)
            assert c.threshold.tolist() == [largest(accumulated, 16)]
    assert sampled == [3, 7, 14, 21, 28]


@pytest.mark.parametrize("density, picks", [(0.005, 4096), (0.02, 4096), (0.001, 16_000)])
def test_sample_has_4096_entries_or_enough_for_16_to_pass(density, picks):
    c = Compressor(200_000, density)
    grad = grads(200_000, 0)
    c.pack(grad)
    by_picks = torch.ops.dct.sample_threshold(grad, torch.zeros_like(grad), density, 1, picks, 0)
    assert torch.equal(c.threshold, by_picks)


def test_each_range_has_its_own_threshold():
    c = Compressor(20_000, density=0.01, ranges=3, max_samples=20_000)
    grad = torch.cat([grads(BLOCK, 0), grads(20_000 - BLOCK, 1, scale=100.0)])
    c.pack(grad)
    expected = [largest(grad[:BLOCK], 164), largest(grad[BLOCK:], 37), math.inf]
    assert c.threshold.tolist() == expected
    assert c.seen.tolist() == [164, 37, 0]


def test_default_capacity_is_five_quarters_of_the_density():
    assert Compressor(100_000, density=0.01).capacity == 1250
    assert Compressor(100_000, density=0.01, ranges=2).capacity == 820  # 4 blocks
    assert Compressor(1000, density=0.0001).capacity == 1
    assert Compressor(1000, density=0.9).capacity == 1000


def test_gradients_r_times_smaller_are_sent_after_about_70_r_steps():
    """Checks the rule in docs/guide/ddp.md at density 0.5 %, with constant gradients."""
    small, ratio = 40, 10
    grad = grads(4000, 0)
    grad[:small] /= ratio
    c = Compressor(4000, density=0.005, value_dtype=torch.float32)
    accumulated = torch.zeros(small)
    while torch.equal(c.residual[:small], accumulated) and c.step < 3000:
        accumulated = c.residual[:small] + grad[:small]
        c.pack(grad)
    assert 50 * ratio < c.step < 100 * ratio


def test_density_is_kept_when_gradients_shrink_unless_the_threshold_is_kept():
    passed = {1: [], 500: []}  # by refresh_every
    for every, shares in passed.items():
        c = Compressor(20_000, density=0.01, refresh_every=every)
        for step in range(900):
            c.pack(grads(20_000, step, scale=1.0 if step < 600 else 0.1))
            shares.append(int(c.seen) / 200)
    late = {every: sum(shares[650:700]) / 50 for every, shares in passed.items()}
    # The number of entries that pass has a standard error of 14 %, because of the sample.
    assert min(passed[1][:10]) > 0.9 and max(passed[1]) < 1.8
    assert 0.97 < sum(passed[1]) / 900 < 1.03
    assert max(passed[500][:500]) > 3  # residuals grow, and the threshold does not
    assert 0.97 < late[1] < 1.03
    assert late[500] < 0.5


def test_only_nonfinite_entries_pass_if_they_exceed_the_density():
    c = Compressor(100, density=0.1, capacity=100, value_dtype=torch.float32)
    c.pack(grads(100, 0))
    accumulated, grad = c.residual.clone(), grads(100, 1)
    grad[:20] = math.nan
    info = payload_info(c.pack(grad))
    assert c.threshold.tolist() == [math.inf] and (info.count, info.non_finite) == (20, True)
    assert torch.equal(c.residual, torch.where(grad.isfinite(), accumulated + grad, accumulated))
    c.pack(torch.zeros(100))
    assert c.threshold.isfinite().all()


def test_last_threshold_is_kept_after_a_nonfinite_sample():
    c = Compressor(100, density=0.1, refresh_every=3)
    first = grads(100, 0)
    for step in range(8):
        grad = torch.full((100,), math.inf) if step == 3 else grads(100, step)
        c.pack(grad)
        assert (c.threshold.item() == largest(first, 10)) == (step < 6)
    assert c.residual.isfinite().all()


def test_kept_threshold_passes_no_finite_entry_before_a_finite_sample():
    c = Compressor(100, density=0.1, refresh_every=1000)
    c.pack(torch.full((100,), math.nan))
    assert c.threshold.tolist() == [math.inf] and not c.residual.any()
    c.pack(grads(100, 0))
    assert c.seen.tolist() == [0] and torch.equal(c.residual, grads(100, 0))
    c.take_back()  # as if a scaler skipped the step; the next step samples again
    c.pack(grads(100, 1))
    assert c.threshold.tolist() == [largest(grads(100, 0) + grads(100, 1), 10)]


def test_all_nonzero_entries_pass_if_most_are_zero():
    c = Compressor(1000, density=0.1, capacity=100, value_dtype=torch.float32)
    rare = torch.zeros(1000)
    rare[:20] = 1.0
    for _ in range(3):
        c.pack(rare)
        assert c.threshold.tolist() == [0.0]
        assert c.seen.tolist() == [20]  # all nonzero entries, because they are fewer than 100
        assert torch.equal(sent_by(c), rare)
    c.pack(grads(1000, 0))
    assert c.threshold.tolist() == [largest(grads(1000, 0), 100)]


def test_take_back_restores_the_residual_exactly():
    c = Compressor(200, density=0.1, capacity=20)
    c.pack(grads(200, 0))
    history = c.residual.clone()
    grad = grads(200, 1, scale=10.0)
    grad[3], grad[7] = math.inf, math.nan
    c.density = 1  # at density 1, all entries pass, which exceeds the capacity
    c.threshold.zero_()
    info = payload_info(c.pack(grad))
    assert info.overflow and info.non_finite and info.count == 20
    assert c.residual[0] != history[0] + grad[0]  # element 0 was sent
    c.take_back()
    expected = torch.where(grad.isfinite(), history + grad, history)
    assert torch.equal(c.residual, expected)
    c.take_back()
    assert torch.equal(c.residual, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_group_with_a_nonfinite_entry_keeps_its_residual(bad):
    codec = Quantized(BLOCK * 2, "int4", 2, None, torch.device("cpu"))
    codec.pack(grads(BLOCK * 2, 0))
    before, grad = codec.residual.clone(), grads(BLOCK * 2, 1)
    accumulated = before + grad
    grad[BLOCK + 5] = bad
    first, second = map(payload_info, codec.pack(grad))
    assert not first.non_finite and second.non_finite
    group = slice(BLOCK, BLOCK + SCALED)
    out = torch.empty(BLOCK * 2)
    codec.unpack(codec.payload.unsqueeze(0), out)
    assert out[group].isnan().all() and out.isnan().sum() == SCALED
    expected = accumulated.clone()
    expected[group] = before[group]
    assert torch.equal(codec.residual + out.nan_to_num(), expected)
    for _ in range(2):  # the second call has no effect
        codec.take_back()
        assert torch.equal(codec.residual, expected)


def test_invalid_arguments():
    wrong = {"density": "1", "value_dtype": torch.float16, "ranges": 0, "capacity": 0}
    for name, value in (wrong | {"refresh_every": 0, "max_samples": 0}).items():
        with pytest.raises((ValueError, TypeError), match=f"{name} must be .*, got "):
            Compressor(**{"numel": 10, name: value})


def test_invalid_tensors_raise_before_anything_is_written():
    compressor = Compressor(100, density=0.1)
    before = compressor.payload.clone()
    with pytest.raises(
        ValueError, match=r"dct::Compressor.pack: grad must have shape \[100\], got \[99\]"
    ):
        compressor.pack(torch.randn(99))
    assert torch.equal(compressor.payload, before) and not compressor.residual.any()
    out = torch.ones(100)
    with pytest.raises(ValueError, match="payloads must have at least 1 payload, got 0"):
        compressor.unpack(compressor.payload.new_empty(0, compressor.payload.numel()), out)
    assert torch.equal(out, torch.ones(100))
