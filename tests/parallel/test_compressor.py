"""The compressor alone: no network, several payloads made in one process."""

import math

import pytest
import torch

from dct_kernels import payload_info
from dct_parallel import Compressor


def grads(numel, seed, scale=1.0):
    return scale * torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def sent_by(compressor):
    """What the last payload holds, dense."""
    out = torch.empty(compressor.residual.numel())
    assert compressor.unpack(compressor.payload.unsqueeze(0), out).tolist() == [0]
    return out


def test_thresholds_are_sampled_at_0_1_2_4_to_512_then_every_refresh_every():
    c = Compressor(64, [0, 64], density=0.25, refresh_every=300)
    sampled = []
    for step in range(1000):
        before = c.reference.clone()
        c.pack(grads(64, step))
        if not torch.equal(before, c.reference):
            sampled.append(step)
    assert sampled == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 512, 600, 900]


def test_a_sample_is_the_magnitude_that_density_reaches_per_segment():
    c = Compressor(3000, [0, 1000, 3000], density=0.01)
    grad = torch.cat([grads(1000, 0), grads(2000, 1, scale=100.0)])
    c.pack(grad)
    expected = [grad[:1000].abs().sort().values[-10], grad[1000:].abs().sort().values[-20]]
    assert c.threshold.tolist() == [t.item() for t in expected]
    assert c.seen.tolist() == [10, 20]


@pytest.mark.parametrize("value_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capacity", [None, 7], ids=["default", "overflowing"])
def test_what_was_sent_and_what_is_left_is_all_there_was(value_dtype, capacity):
    c = Compressor(500, [0, 200, 500], density=0.1, value_dtype=value_dtype, capacity=capacity)
    total, sent = torch.zeros(500), torch.zeros(500)
    overflowed = False
    for step in range(60):
        grad = (64 * grads(500, step)).round()  # integers: every sum below is exact in float32
        payload = c.pack(grad)
        overflowed |= payload_info(payload).overflow
        sent += sent_by(c)
        total += grad
        assert torch.equal(sent + c.residual, total)
    assert sent.count_nonzero() > 100
    assert overflowed or capacity is None


@pytest.mark.parametrize("value_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_a_whole_segment_everything_is_sent_for_good(value_dtype):
    kwargs = {"density": 0.1, "refresh_every": 3, "value_dtype": value_dtype}
    c = Compressor(500, [0, 100, 400, 500], whole=[0, 2], **kwargs)
    assert c.capacity == 200 + math.ceil(1.25 * 0.1 * 300)
    total, sent = torch.zeros(500), torch.zeros(500)
    for step in range(40):
        grad = (64 * grads(500, step)).round()
        c.pack(grad)
        sent += sent_by(c)
        total += grad
        assert torch.equal(sent + c.residual, total)
        assert c.threshold[[0, 2]].tolist() == c.reference[[0, 2]].tolist() == [0, 0]
        assert c.threshold[1] > 0
        # Sent at once, up to what bfloat16 rounds off: at most half a unit of 8 bits.
        rounded = 0 if value_dtype == torch.float32 else 2**-8 * grad[:100].abs().max()
        assert c.residual[:100].abs().max() <= rounded


def test_a_segment_is_whole_or_skipped_not_both():
    with pytest.raises(ValueError, match="whole must be of segments that are not skipped, got 1"):
        Compressor(500, [0, 100, 500], skip=[1], whole=[1])
    with pytest.raises(ValueError, match="dct::Compressor: whole must be in"):
        Compressor(500, [0, 100, 500], whole=[2])


def test_word_of_damage_holds_no_entries_and_changes_nothing_else():
    c = Compressor(500, [0, 100, 500], density=0.1, whole=[0])
    c.pack(grads(500, 0))
    before = [t.clone() for t in (c.residual, c.threshold, c.reference, c.seen, c.sampled_at)]
    info = payload_info(c.pack_damage())
    assert (info.damage, info.count, info.overflow, info.non_finite) == (True, 0, False, False)
    assert sent_by(c).count_nonzero() == 0
    after = [c.residual, c.threshold, c.reference, c.seen, c.sampled_at]
    assert all(map(torch.equal, before, after)) and c.step == 1
    assert not payload_info(c.pack(grads(500, 1))).damage


def test_when_each_threshold_was_sampled():
    c = Compressor(600, [0, 100, 300, 600], density=0.1, whole=[0], refresh_every=10**6)
    for step in range(6):
        grad = grads(600, step)
        if step == 4:
            grad[300:] = torch.inf
        c.pack(grad)
    assert c.sampled_at.tolist() == [0, 4, 2]  # a sample that is not finite is discarded
    c.step = 9
    c.load_segment(1, c.segment_state(1))
    assert c.sampled_at.tolist() == [0, 9, 2]


def test_default_capacity_is_five_quarters_of_the_density_of_what_is_compressed():
    assert Compressor(100_000, [0, 20_000, 100_000], density=0.01, skip=[0]).capacity == 1000
    assert Compressor(1000, [0, 1000], density=0.0001).capacity == 1
    assert Compressor(1000, [0, 1000], density=0.9).capacity == 1000


def test_tracked_holds_the_density_when_gradients_shrink_and_fixed_starves():
    passed = {}
    for policy in ("tracked", "fixed"):
        c = Compressor(20_000, [0, 20_000], density=0.01, refresh_every=10**6, policy=policy)
        for step in range(900):
            c.pack(grads(20_000, step, scale=1.0 if step < 600 else 0.4))
            passed.setdefault(policy, []).append(int(c.seen) / 200)
    late = {policy: sum(p[800:]) / 100 for policy, p in passed.items()}
    before = {policy: sum(p[400:600]) / 200 for policy, p in passed.items()}
    assert 0.95 < before["tracked"] < 1.05
    assert before["fixed"] > 1.1
    assert 0.8 < late["tracked"] < 1.2
    assert late["fixed"] < 0.3


def test_a_non_finite_sample_is_discarded():
    c = Compressor(100, [0, 100], density=0.1)
    c.pack(torch.full((100,), math.nan))
    assert c.threshold.tolist() == [0.0]
    assert c.residual.abs().max() == 0
    c.pack(grads(100, 0))
    tau = c.threshold.clone()
    assert tau.item() == grads(100, 0).abs().sort().values[-10].item()
    c.pack(torch.full((100,), math.inf))
    assert torch.equal(c.threshold, tau)
    assert torch.equal(c.reference, tau)


def test_a_sample_of_zero_stays_until_more_than_its_share_passes():
    c = Compressor(1000, [0, 1000], density=0.1, capacity=1000, value_dtype=torch.float32)
    rare = torch.zeros(1000)
    rare[:20] = 1.0
    for _ in range(3):
        c.pack(rare)
        c.resample_if_flooded(c.seen, c.threshold)
    assert c.threshold.tolist() == [0.0]
    assert c.seen.tolist() == [20]  # fewer than 100: all of them
    dense = grads(1000, 0)
    c.pack(dense)  # step 3: no sample is due
    assert c.threshold.tolist() == [0.0]
    assert c.seen.tolist() == [1000]
    c.resample_if_flooded(c.seen, c.threshold)
    assert c.step == 4
    resumed = Compressor(1000, [0, 1000], density=0.1, refresh_every=10**6)
    resumed.load_segment(0, c.segment_state(0))
    for goes_on in (c, resumed):
        goes_on.step = 5  # no sample due here either
        goes_on.pack(dense)
        assert goes_on.threshold.item() == dense.abs().sort().values[-100].item()


def test_skipped_segments_are_left_alone():
    c = Compressor(300, [0, 100, 300], density=0.1, skip=[0])
    c.residual[:100] = 7.0
    for step in range(4):
        c.pack(grads(300, step))
    assert c.threshold[0] == -1
    assert c.seen[0] == 0
    assert torch.equal(c.residual[:100], torch.full((100,), 7.0))
    assert sent_by(c)[:100].count_nonzero() == 0
    assert sent_by(c)[100:].count_nonzero() > 0


def test_density_one_sends_everything_and_never_samples():
    c = Compressor(1000, [0, 400, 1000], density=1, value_dtype=torch.float32)
    assert c.capacity == 1000
    for step in range(5):
        grad = grads(1000, step)
        c.pack(grad)
        assert torch.equal(sent_by(c), grad)
        assert c.threshold.tolist() == c.reference.tolist() == [0.0, 0.0]
        assert c.residual.count_nonzero() == 0


def test_unpack_writes_the_mean_in_the_units_of_out_scale():
    ranks = [Compressor(50, [0, 50], density=1, value_dtype=torch.float32) for _ in range(3)]
    payloads = torch.stack([c.pack(grads(50, rank)) for rank, c in enumerate(ranks)])
    total = torch.zeros(50)
    for rank in range(3):
        total = total + grads(50, rank)
    factor = torch.tensor(1 / 3) * torch.tensor(1024.0)
    out = torch.full((50,), math.nan)
    status = ranks[0].unpack(payloads, out, torch.tensor(1024.0))
    assert status.tolist() == [0, 0, 0]
    assert torch.equal(out, total * factor)


def test_scaled_gradients_pack_like_unscaled_ones():
    plain, scaled = (Compressor(500, [0, 500], density=0.1) for _ in range(2))
    for step in range(4):
        a = plain.pack(grads(500, step)).clone()
        b = scaled.pack(grads(500, step) * 4096, torch.tensor(1 / 4096))
        assert torch.equal(a, b)
        assert torch.equal(plain.residual, scaled.residual)
        assert torch.equal(plain.threshold, scaled.threshold)


def test_take_back_undoes_the_sending_exactly():
    c = Compressor(200, [0, 200], density=0.1, capacity=20)
    c.pack(grads(200, 0))
    history = c.residual.clone()
    grad = grads(200, 1, scale=10.0)
    grad[3], grad[7] = math.inf, math.nan
    c.threshold.zero_()
    c.step = 3  # no sample: everything passes, which is more than there is room for
    info = payload_info(c.pack(grad))
    assert info.overflow and info.non_finite and info.count == 20
    assert c.residual[0] != history[0] + grad[0]  # element 0 was sent
    c.take_back()
    expected = torch.where(grad.isfinite(), history + grad, history)
    assert torch.equal(c.residual, expected)
    c.take_back()
    assert torch.equal(c.residual, expected)


def test_segment_state_goes_on_in_another_layout():
    a = Compressor(300, [0, 100, 300], density=0.1)
    for step in range(4):
        a.pack(grads(300, step))
    b = Compressor(300, [0, 200, 300], density=0.1)
    b.load_segment(0, a.segment_state(1))
    b.load_segment(1, a.segment_state(0))
    b.step = a.step
    grad = grads(300, 9)
    a.pack(grad)
    b.pack(torch.cat([grad[100:], grad[:100]]))
    assert torch.equal(a.residual, torch.cat([b.residual[200:], b.residual[:200]]))
    assert torch.equal(a.threshold, b.threshold.flip(0))
    assert torch.equal(a.seen, b.seen.flip(0))


@pytest.mark.parametrize(
    "kwargs, error, text",
    [
        ({"density": 0}, ValueError, r"density must be in \(0, 1\], got 0"),
        ({"density": math.nan}, ValueError, r"density must be in \(0, 1\], got nan"),
        ({"density": "1"}, TypeError, "density must be a number, got str"),
        ({"refresh_every": 0}, ValueError, "refresh_every must be in"),
        ({"policy": "fast"}, ValueError, "policy must be 'tracked' or 'fixed', got 'fast'"),
        ({"value_dtype": torch.float16}, TypeError, "value_dtype must be float32 or bfloat16"),
        (
            {"segments": [0, 5]},
            ValueError,
            r"segments must be integers ascending from 0 to 10, got \[0, 5\]",
        ),
        ({"segments": [0, 7, 5, 10]}, ValueError, "segments must be integers ascending"),
        ({"segments": [0, 9.7, 10]}, ValueError, r"integers ascending .* got \[0, 9\.7, 10\]"),
        ({"segments": "ab"}, ValueError, "segments must be integers ascending .*, got ab"),
        ({"segments": 5}, ValueError, "segments must be integers ascending .*, got 5"),
        ({"segments": [0, None]}, ValueError, r"segments must be integers .*, got \[0, None\]"),
        ({"segments": torch.tensor(10)}, ValueError, "segments must be integers .*, got 10"),
        ({"skip": [3]}, ValueError, r"skip must be in \[0, 0\], got 3"),
        ({"capacity": 0}, ValueError, "capacity must be in"),
        ({"max_samples": 0}, ValueError, "max_samples must be in"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_are_explained(kwargs, error, text):
    with pytest.raises(error, match=text):
        Compressor(**{"numel": 10, "segments": [0, 10], **kwargs})


def test_tensors_that_do_not_fit_are_refused_before_anything_is_written():
    compressor = Compressor(100, [0, 100], density=0.1)
    before = compressor.payload.clone()
    with pytest.raises(ValueError, match=r"dct::Compressor.pack: grad must be \[100\], got \[99\]"):
        compressor.pack(torch.randn(99))
    with pytest.raises(TypeError, match=r"dct::Compressor.pack: grad must be a tensor, got list"):
        compressor.pack([1, 2])
    assert torch.equal(compressor.payload, before) and not compressor.residual.any()
    out = torch.ones(100)
    with pytest.raises(TypeError, match=r"Compressor.unpack: payloads must be a tensor, got int"):
        compressor.unpack(5, out)
    with pytest.raises(ValueError, match="payloads must be one or more, got none"):
        compressor.unpack(compressor.payload.new_empty(0, compressor.payload.numel()), out)
    assert torch.equal(out, torch.ones(100))


@pytest.mark.parametrize("index", [9, 2, -1])
def test_a_segment_that_is_not_there(index):
    c = Compressor(500, [0, 100, 500])
    state = c.segment_state(0)
    with pytest.raises(ValueError, match=rf"segment_state: index must be in \[0, 1\], got {index}"):
        c.segment_state(index)
    with pytest.raises(ValueError, match=rf"load_segment: index must be in \[0, 1\], got {index}"):
        c.load_segment(index, state)
