"""Valid arguments of every op, and checks of the errors that invalid ones raise."""

import re

import pytest
import torch
from oracle import quantized_payload

import dct_kernels

U8, I32, I64 = torch.uint8, torch.int32, torch.int64
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
OPS = ("sample_threshold", "mask_pack", "scatter_unpack")
OPS += ("quantize_pack", "dequantize_sum")
OPS += ("row_pack", "row_gather", "row_unpack")
OPS += ("row_quantize", "row_dequantize", "row_dequantize_sum")
OPS += ("diff_pack", "patch_check", "patch_apply", "checksum")
NUMEL, CAPACITY, K, WIDTH, ROWS = 100, 10, 4, 50, 3
NBYTES = dct_kernels.payload_layout(NUMEL, CAPACITY, F32, ranges=2).nbytes
QUANTIZED_BYTES = dct_kernels.quantized_payload_bytes(NUMEL, "int8")
PATCH_BYTES = dct_kernels.patch_bytes(NUMEL, CAPACITY)


def arguments(op):
    """Valid arguments by name; every call creates new tensors."""
    f32, grad, one = torch.ones(NUMEL), torch.ones(NUMEL), torch.tensor(1.0)
    received, sent = valid_payloads(), torch.full((QUANTIZED_BYTES,), 7, dtype=U8)
    # 4 column indices of one byte are smaller than a bitmap of 50 columns, which has 7 bytes.
    x, positions = torch.ones(ROWS, WIDTH), torch.zeros(ROWS, K, dtype=U8)
    values, rows = torch.ones(ROWS, K), torch.zeros(ROWS, WIDTH + 2, dtype=U8)
    of_ranks = torch.zeros(2, ROWS, WIDTH + 2, dtype=U8)
    half, patch = torch.ones(NUMEL, dtype=BF16), torch.full((PATCH_BYTES,), 7, dtype=U8)
    return {
        "sample_threshold": {
            "grad": grad,
            "residual": torch.zeros(NUMEL),
            "density": 0.1,
            "ranges": 2,
            "max_samples": 50,
            "seed": 0,
            "inv_scale": one,
        },
        "mask_pack": {
            "residual": f32,
            "grad": grad,
            "threshold": torch.ones(2),
            "payload": torch.full((2, NBYTES), 7, dtype=U8),
            "seen": torch.full((2,), -1, dtype=I32),
            "capacity": CAPACITY,
            "value_dtype": F32,
            "inv_scale": one,
        },
        "scatter_unpack": {
            "payloads": torch.full((2, NBYTES), 7, dtype=U8),
            "out": f32,
            "capacity": CAPACITY,
            "value_dtype": F32,
            "scale": 1.0,
            "out_scale": one,
        },
        "quantize_pack": {
            "residual": f32,
            "grad": grad,
            "payload": sent,
            "format": "int8",
            "inv_scale": one,
        },
        "dequantize_sum": {
            "payloads": received,
            "out": f32,
            "format": "int8",
            "scale": 0.5,
            "out_scale": one,
        },
        "row_pack": {"x": x, "k": K, "value_dtype": F32},
        "row_gather": {"x": x, "positions": positions, "k": K, "value_dtype": F32},
        "row_unpack": {"values": values, "positions": positions, "width": WIDTH, "dtype": F32},
        "row_quantize": {"x": x, "format": "int8"},
        "row_dequantize": {"rows": rows, "width": WIDTH, "format": "int8", "dtype": F32},
        "row_dequantize_sum": {"rows": of_ranks, "width": WIDTH, "format": "int8", "dtype": F32},
        "diff_pack": {
            "weights": f32,
            "snapshot": half,
            "patch": patch,
            "checksums": torch.full((2,), -1, dtype=I64),
            "capacity": CAPACITY,
        },
        "patch_check": {"patch": patch, "numel": NUMEL, "dtype": BF16},
        "patch_apply": {"patch": patch, "weights": half},
        "checksum": {"weights": half},
    }[op]


def valid_payloads():
    """Payloads of two ranks with valid headers. All other bytes are 7."""
    payloads = torch.full((2, QUANTIZED_BYTES), 7, dtype=U8)
    header = quantized_payload.header(NUMEL, "int8")
    payloads[:, : len(header)] = torch.frombuffer(bytearray(header), dtype=U8)
    return payloads


def placed(value, device):
    """Copy a tensor to the device with the same strides and storage offset."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    memory = torch.empty(0, dtype=U8).set_(storage).to(device).view(value.dtype)
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def snapshot(args):
    """The tensors as bytes, because NaN values do not compare equal."""
    return [t.clone().contiguous().view(U8) for t in tensors(args)]


def tensors(args):
    return [a for a in args.values() if isinstance(a, torch.Tensor) and not a.is_meta and a.dim()]


def raises(call, args, op, named, error):
    """Check that the error names the argument and nothing is written; return the error text."""
    before = snapshot(args)
    with pytest.raises(error) as caught:
        call(**args)
    for was, now in zip(before, snapshot(args), strict=True):
        assert torch.equal(was, now)
    text = str(caught.value)
    text = text[text.index("dct::") :].partition("\n")[0]  # torch may add other text
    assert re.match(rf"dct::{op}: {re.escape(named)}\S* must .+, got .+", text), text
    return text


def refused(backend, op, args, named, error):
    """Check the errors of the public function and the backend's op; return the first error's text.

    A Python backend raises the same error. A compiled backend raises RuntimeError. The values after
    "got" in its text also occur in the public function's text, except for the word "other".
    """
    text = raises(getattr(dct_kernels, op), args, op, named, error)
    assert re.match(rf"dct::{op}: {re.escape(named)} must ", text), text
    call = getattr(backend, op)
    if isinstance(call, torch._ops.OpOverload):
        called = raises(call, args, op, named.partition(".")[0], RuntimeError)
        assert values_got(called) <= values_got(text) | {"other"}, called
        assert values_got(called) or not values_got(text), called
    else:
        assert raises(call, args, op, named, error) == text
    return text


def values_got(text):
    """The numbers and words after "got" in an error text."""
    found = re.findall(r"-?[\d.]+|\w+", text.rpartition(", got ")[2])
    return {float(f) if f.lstrip("-")[0].isdigit() else f for f in found}
