"""Laws that hold for any input, searched with hypothesis; no oracle but the laws themselves."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import floats, payload, quantized_payload
from oracle import rows as oracle_rows

from conformance import bits, calls, quantized_calls
from dct_kernels.row_layout import FORMATS

any_float = st.floats(width=32)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
value_dtypes = st.sampled_from(bits.PAYLOAD_VALUES)


@settings(max_examples=100)
@given(
    pairs=st.lists(st.tuples(any_float, any_float), max_size=30),
    tau=any_float,
    capacity=st.integers(1, 40),
    value_dtype=value_dtypes,
)
def test_mask_pack(backend, pairs, tau, capacity, value_dtype):
    """Against the oracle, and by its laws: nothing small is packed, nothing is lost."""
    residual, grad = torch.tensor(pairs, dtype=torch.float32).view(-1, 2).t().contiguous()
    packed = calls.mask_pack(
        backend, residual, grad, tau, capacity=capacity, value_dtype=value_dtype
    )
    content = packed.contents[0]
    acc = floats.accumulate(residual.numpy(), grad.numpy(), None)
    indices = payload.indices(content)
    assert indices == sorted(set(indices))
    assert content.count == min(capacity, packed.seen.item())
    sent = np.zeros(len(acc), np.float32)
    sent[indices] = floats.widen(content.values, bits.name(value_dtype))
    for i, a in enumerate(acc):
        if np.isfinite(a):
            assert sent[i] + packed.residual[i].item() == a
        else:
            assert not math.isnan(packed.residual[i])
        if i in indices:
            assert a != 0
            assert not abs(a) < tau


@settings(max_examples=40)
@given(
    ranks=st.lists(st.lists(finite, min_size=9, max_size=9), min_size=1, max_size=4),
    value_dtype=value_dtypes,
)
def test_what_every_rank_packs_is_what_unpack_sums(backend, ranks, value_dtype):
    """sum over ranks of (acc - new residual) arrives, in rank order, and nothing else."""
    rows, expected = [], np.zeros(9, np.float32)
    for values in ranks:
        acc = torch.tensor(values)
        packed = calls.mask_pack(backend, acc, None, 1.0, value_dtype=value_dtype)
        rows.append(packed.rows)
        geometry = packed.geometry
        with np.errstate(over="ignore", invalid="ignore"):
            expected = expected + (acc.numpy() - packed.residual.numpy())
    out, status = calls.scatter_unpack(backend, rows, geometry)
    assert status == [0] * len(ranks)
    assert np.array_equal(out.numpy(), expected, equal_nan=True)


@settings(max_examples=80)
@given(
    values=st.lists(any_float, min_size=1, max_size=90),
    power=st.sampled_from([-140, -20, 0, 20]),
    format=st.sampled_from(quantized_payload.FORMATS),
)
def test_quantize_pack(backend, values, power, format):
    """By the oracle, and by the laws: what is sent is near, and the rest is left, bit for bit."""
    grad = torch.tensor(values) * 2.0**power
    packed = quantized_calls.quantize_pack(backend, torch.zeros(len(grad)), grad, format)
    assert packed.flags == [0 if grad.isfinite().all() else 2]
    scaled = format in quantized_payload.WITH_SCALES
    for low in range(0, len(grad), 64 if scaled else 1):
        part = slice(low, low + (64 if scaled else 1))
        acc, sent = grad.numpy()[part], packed.values[part]
        left = packed.residual.numpy()[part]
        if not np.isfinite(acc).all():
            assert not left.any()
            assert np.isnan(sent).all() or np.array_equal(sent, acc)
            continue
        assert (left == (acc.astype(float) - sent).astype(np.float32)).all()
        step = np.abs(sent).max() / {"int8": 126, "int4": 7}.get(format, 1)
        if format in ("int8", "int4") and step > 0:
            assert (np.abs(left) <= 0.5001 * step).all()
        elif format == "ternary":
            assert set(np.abs(sent)) <= {0, step}
        elif format == "float32":
            assert np.array_equal(sent, acc)


@settings(max_examples=100)
@given(values=st.lists(any_float, min_size=1, max_size=60), density=st.floats(1e-6, 1.0))
def test_sample_threshold(backend, values, density):
    """At least k entries reach the threshold, and fewer than k exceed it."""
    x = torch.tensor(values, dtype=torch.float32)
    tau = calls.sample_threshold(backend, x, None, density).item()
    k = min(max(math.ceil(density * len(values)), 1), len(values))
    magnitudes = [math.inf if math.isnan(v) else abs(v) for v in x.tolist()]
    assert sum(m >= tau for m in magnitudes) >= k
    assert sum(m > tau for m in magnitudes) < k
    assert tau in magnitudes


@settings(max_examples=100)
@given(data=st.data(), width=st.integers(1, 300), dtype=st.sampled_from(bits.FLOATS))
def test_row_pack_and_unpack(backend, data, width, dtype):
    """Whatever was dropped is no larger than whatever was kept."""
    k = data.draw(st.integers(1, width))
    seed = data.draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    raw = rng.choice(rng.integers(0, 2**16, 20, dtype=np.uint16), (2, width))
    x = bits.from_raw(raw if dtype.itemsize == 2 else raw.astype(np.uint32) << 16, dtype)
    values, positions = backend.row_pack(x.to(backend.device), k, dtype)
    dense = backend.row_unpack(values, positions, width, dtype).cpu()
    for row, bytes_, unpacked in zip(x, positions.cpu(), dense, strict=True):
        columns = oracle_rows.decode(bytes_.numpy().tobytes(), width, k)
        assert None not in columns
        magnitudes = bits.numbers(row.nan_to_num(math.inf, math.inf, math.inf).abs())
        dropped = [magnitudes[c] for c in range(width) if c not in columns]
        assert max(dropped, default=-1) <= min(magnitudes[columns])
        expected = torch.zeros(width, dtype=dtype)
        expected[columns] = row[columns]
        assert torch.equal(unpacked.nan_to_num(7.0), expected.nan_to_num(7.0))


@settings(max_examples=60)
@given(
    row=st.lists(finite, min_size=1, max_size=70),
    power=st.integers(-3, 3),
    format=st.sampled_from(FORMATS),
)
def test_quantized_rows(backend, row, power, format):
    """Nothing is further off than its step, no sign changes, and rows scale with powers of 2."""

    def through(x):
        rows = backend.row_quantize(x.to(backend.device), format)
        y = backend.row_dequantize(rows, x.shape[1], format, torch.float32).cpu()
        scale = rows[0, -2:].cpu().numpy().copy().view(np.uint16)
        return y, floats.widen(scale, "bfloat16").item()

    x = torch.tensor([row])
    y, step = through(x)
    assert step >= 0
    assert (y * x.sign() >= 0).all() or format == "sign"
    if step == 0:
        assert (y == 0).all()
    elif format in ("int8", "int4"):
        assert ((y.double() - x.double()).abs() <= 0.5001 * step).all()
        assert (y.abs() >= step * (126 if format == "int8" else 7)).any()
    else:
        values = (-step, step) if format == "sign" else (-step, 0.0, step)
        assert torch.isin(y, torch.tensor(values)).all()
        assert step <= x.double().abs().max() * 1.01
    exact = torch.equal(x * 2.0**power * 2.0**-power, x)  # else an entry, and its sign, is lost
    if 2.0**-90 < step < 2.0**90 and exact:
        scaled, _ = through(x * 2.0**power)
        assert torch.equal(scaled, y * 2.0**power)
