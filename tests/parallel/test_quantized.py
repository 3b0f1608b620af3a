"""Dense payloads in all formats: contents, residuals, and corruption."""

import numpy as np
import pytest
import torch
from conformance import bits, samples
from oracle import quantized_payload as oracle

import dct_kernels
from dct_kernels import payload_info, quantized_payload_bytes
from dct_kernels.layout import ROW, SCALED
from dct_kernels.reference import row_dequantize, row_quantize
from dct_parallel.exchange.quantized import FORMATS, QUANTIZED_FORMATS, Quantized
from dct_parallel.exchange.settings import Settings

CPU = torch.device("cpu")
BLOCK = 16_384
NUMELS = (0, 1, 1023, 1024, 1025, BLOCK - 1, BLOCK, BLOCK + 1, 50_000)


def _numbers(numel, seed=0):
    """Return numbers whose magnitudes vary widely between and within rows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 4, (numel // ROW + 1,), generator=generator).float()
    x = torch.randn(numel, generator=generator) * sizes.repeat_interleave(ROW)[:numel]
    return x * 2.0 ** torch.randint(-12, 3, (numel,), generator=generator).float()


def _sent(codec):
    out = torch.empty_like(codec.residual)
    assert not codec.unpack(codec.payload.unsqueeze(0), out).any()
    return out


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("numel", NUMELS)
def test_sent_plus_residual_equals_the_accumulated_gradient(format, numel):
    codec = Quantized(numel, format, 1, None, CPU)
    for step in range(4):
        grad, before = _numbers(numel, step), codec.residual.clone()
        payload = codec.pack(grad)
        acc = (before + grad).double()
        assert payload.numel() == quantized_payload_bytes(numel, format)
        info = payload_info(payload)
        assert (info.value_dtype, info.numel, info.count) == (format, numel, numel)
        sent, left = _sent(codec).double(), codec.residual.double()
        if format == "ternary":  # the residual is rounded once
            assert (sent + left - acc).abs().le(2.0**-24 * left.abs() + 1e-45).all()
        else:
            assert torch.equal(sent + left, acc)
        if format in QUANTIZED_FORMATS:  # rows of 64 entries; zeros fill the last row
            rows = torch.nn.functional.pad(before + grad, (0, -numel % SCALED)).view(-1, SCALED)
            expected = row_dequantize(row_quantize(rows, format), SCALED, format, torch.float32)
            assert torch.equal(sent.float(), expected.flatten()[:numel])
        elif format == "bfloat16":
            assert torch.equal(sent.bfloat16(), (before + grad).bfloat16())
        else:
            assert not left.any()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_mean_plus_the_residual_is_packed(ranks, format):
    """Some entries are NaN or infinite, a header is damaged, and some rows are random bytes."""
    geometry = oracle.Geometry(2100, format)
    codec = Quantized(geometry.numel, format, 1, None, CPU)
    codec.residual.copy_(samples.hard(geometry.numel))
    residual = codec.residual.numpy().copy()
    payloads = torch.zeros(ranks, geometry.nbytes, dtype=torch.uint8)
    for rank, payload in enumerate(payloads):
        grad = samples.normal(geometry.numel, seed=rank)
        grad[40 * rank] = (torch.nan, torch.inf, -torch.inf, 0.0)[rank]
        dct_kernels.quantize_pack(None, grad, payload, format)
    noise = torch.randint(256, (500,), generator=torch.Generator().manual_seed(0))
    payloads[0, -600:-100] = noise.to(torch.uint8)
    payloads[ranks // 2, 9] ^= ranks > 1
    row = bytearray(geometry.nbytes)
    received = [payload.numpy().tobytes() for payload in payloads]
    expected, expected_status = oracle.pack_mean(received, residual, row, geometry)
    mean = torch.empty(geometry.numel)
    status, packed = codec.unpack(payloads, mean), codec.pack(mean)
    assert status.tolist() == expected_status.tolist()
    assert sum(expected_status) == (ranks > 1)
    assert packed.numpy().tobytes() == bytes(row)
    bits.assert_floats(codec.residual, expected.view(np.uint32), "residual")
    assert codec.residual.isfinite().all()


def test_gradients_are_unscaled_first():
    x, scale = _numbers(2000), torch.tensor([1 / 1024])
    plain, scaled = (Quantized(2000, "int4", 1, None, CPU) for _ in range(2))
    plain.pack(x)
    scaled.pack(x * 1024, scale)
    assert torch.equal(plain.payload, scaled.payload)
    from_bfloat16, from_float32 = (Quantized(2000, "int8", 1, None, CPU) for _ in range(2))
    from_bfloat16.pack(x.bfloat16(), scale)
    from_float32.pack(x.bfloat16().float(), scale)
    assert torch.equal(from_bfloat16.payload, from_float32.payload)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_group_with_a_nonfinite_entry_keeps_its_residual(bad):
    codec = Quantized(BLOCK * 2, "int4", 2, None, CPU)
    codec.pack(_numbers(BLOCK * 2))
    before, grad = codec.residual.clone(), _numbers(BLOCK * 2, 1)
    acc = before + grad
    grad[BLOCK + 5] = bad
    codec.pack(grad)
    first, second = map(payload_info, codec.payload)
    assert not first.non_finite and second.non_finite
    out = torch.empty(BLOCK * 2)
    codec.unpack(codec.payload.unsqueeze(0), out)
    row = slice(BLOCK, BLOCK + SCALED)
    assert out[row].isnan().all() and out.isnan().sum() == SCALED
    assert torch.equal(codec.residual[row], before[row])
    rest = torch.ones(BLOCK * 2, dtype=torch.bool)
    rest[row] = False
    assert torch.equal((codec.residual + out)[rest], acc[rest])
    codec.take_back()
    assert torch.equal(codec.residual[rest], acc[rest])
    assert torch.equal(codec.residual[row], before[row])
    again = codec.residual.clone()
    codec.take_back()
    assert torch.equal(codec.residual, again)


def test_quantized_format_requires_density_1():
    rule = "dct::DCTState: density must be 1 with format int4, which sends all entries, got"
    with pytest.raises(ValueError, match=f"{rule} 0.005"):
        Settings.checked("DCTState", 0.005, "int4")
    assert Settings.checked("op", None, "int4") == Settings.checked("op", 1, "int4")
