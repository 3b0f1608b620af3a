"""Wrong arguments: an error that names them on every way in, and nothing written."""

import math

import pytest
import torch
from torch import ones, tensor

from conformance import bits
from conformance.arguments import (
    BF16,
    CAPACITY,
    F16,
    F64,
    I32,
    I64,
    NBYTES,
    NUMEL,
    QUANTIZED_BYTES,
    ROWS,
    U8,
    WIDTH,
    K,
    arguments,
    placed,
    refused,
    segments,
)


def u8(*shape):
    return torch.zeros(*shape, dtype=U8)


def i32(*shape):
    return torch.zeros(*shape, dtype=I32)


def strided(*shape):
    return torch.ones(*shape[:-1], 2 * shape[-1])[..., ::2]


def misaligned(*shape):
    return u8(math.prod(shape) + 8)[8:].view(shape)


QBYTES = QUANTIZED_BYTES

# (op, argument, exception of the public function, wrong values)
WRONG = [
    ("sample_threshold", "x", TypeError, [ones(NUMEL, dtype=F64), ones(NUMEL, dtype=I64)]),
    ("sample_threshold", "x", ValueError, [ones(10, 10), strided(NUMEL)]),
    ("sample_threshold", "residual", TypeError, [ones(NUMEL, dtype=BF16)]),
    ("sample_threshold", "residual", ValueError, [ones(NUMEL - 1), strided(NUMEL)]),
    ("sample_threshold", "segments", TypeError, [segments().int()]),
    ("sample_threshold", "segments", ValueError, [segments().view(1, 3), tensor([1, NUMEL])]),
    ("sample_threshold", "segments", ValueError, [torch.empty(0, dtype=I64), tensor([0])]),
    ("sample_threshold", "segments", ValueError, [tensor([0, NUMEL - 1]), tensor([0, NUMEL + 1])]),
    ("sample_threshold", "segments", ValueError, [tensor([0, 60, 40, NUMEL])]),
    ("sample_threshold", "segments", ValueError, [tensor([0, -5, NUMEL])]),
    ("sample_threshold", "segments", ValueError, [tensor([0, 2**62, NUMEL])]),
    ("sample_threshold", "density", ValueError, [0.0, -0.1, 1.5, math.inf, math.nan]),
    ("sample_threshold", "max_samples", ValueError, [0, -1, 2**31]),
    ("sample_threshold", "inv_scale", ValueError, [ones(2), ones(1, 1)]),
    ("sample_threshold", "inv_scale", TypeError, [ones(1, dtype=F64)]),
    ("mask_pack", "residual", TypeError, [ones(NUMEL, dtype=F16)]),
    ("mask_pack", "residual", ValueError, [ones(10, 10), strided(NUMEL)]),
    ("mask_pack", "grad", TypeError, [ones(NUMEL, dtype=F64)]),
    ("mask_pack", "grad", ValueError, [ones(NUMEL + 1), ones(10, 10), strided(NUMEL)]),
    ("mask_pack", "grad", ValueError, [ones(1).expand(NUMEL)]),
    ("mask_pack", "segments", TypeError, [segments().int()]),
    ("mask_pack", "segments", ValueError, [tensor([0, 101, NUMEL]), tensor([0, 40, 99])]),
    ("mask_pack", "segments", ValueError, [tensor([1, 40, NUMEL]), tensor([0, -1, NUMEL])]),
    ("mask_pack", "threshold", ValueError, [ones(3)]),
    ("mask_pack", "threshold", TypeError, [ones(2, dtype=F64)]),
    ("mask_pack", "payload", TypeError, [ones(NBYTES)]),
    ("mask_pack", "payload", ValueError, [u8(NBYTES - 1), u8(NBYTES + 16), u8(NBYTES - 16), u8(0)]),
    ("mask_pack", "payload", ValueError, [u8(0, NBYTES), u8(1, 1, NBYTES)]),
    ("mask_pack", "payload", ValueError, [u8(2, 2 * NBYTES)[:, ::2], misaligned(NBYTES)]),
    ("mask_pack", "seen", TypeError, [ones(2)]),
    ("mask_pack", "seen", ValueError, [i32(1), i32(4)[::2]]),
    ("mask_pack", "capacity", ValueError, [0, -1, 2**32]),
    ("mask_pack", "value_dtype", TypeError, [F16, torch.int8]),
    ("mask_pack", "inv_scale", ValueError, [ones(3)]),
    ("mask_pack", "inv_scale", TypeError, [ones(1, dtype=BF16)]),
    ("mask_pack", "status", TypeError, [torch.zeros(3, dtype=I64), torch.zeros(3)]),
    ("mask_pack", "status", ValueError, [tensor(0, dtype=I32), i32(3, 1), i32(6)[::2]]),
    ("scatter_unpack", "payloads", TypeError, [i32(2, NBYTES)]),
    ("scatter_unpack", "payloads", ValueError, [u8(NBYTES), u8(2, NBYTES - 16)]),
    ("scatter_unpack", "payloads", ValueError, [u8(2, NBYTES + 16), u8(2, 0, NBYTES)]),
    ("scatter_unpack", "payloads", ValueError, [u8(4, NBYTES)[::2], misaligned(2, NBYTES)]),
    ("scatter_unpack", "out", TypeError, [ones(NUMEL, dtype=I64)]),
    ("scatter_unpack", "out", ValueError, [ones(10, 10), strided(NUMEL)]),
    ("scatter_unpack", "capacity", ValueError, [0, 2**32]),
    ("scatter_unpack", "value_dtype", TypeError, [F16]),
    ("scatter_unpack", "out_scale", ValueError, [ones(2)]),
    ("scatter_unpack", "out_scale", TypeError, [ones(1, dtype=F16)]),
    ("quantize_pack", "residual", TypeError, [ones(NUMEL, dtype=BF16)]),
    ("quantize_pack", "residual", ValueError, [ones(10, 10), strided(NUMEL)]),
    ("quantize_pack", "grad", TypeError, [ones(NUMEL, dtype=F64), ones(NUMEL, dtype=I64)]),
    ("quantize_pack", "grad", ValueError, [ones(NUMEL - 1), ones(10, 10), strided(NUMEL)]),
    ("quantize_pack", "grad", ValueError, [ones(1).expand(NUMEL)]),
    ("quantize_pack", "payload", TypeError, [ones(QBYTES)]),
    ("quantize_pack", "payload", ValueError, [u8(QBYTES - 16), u8(QBYTES + 8), u8(64), u8(0)]),
    ("quantize_pack", "payload", ValueError, [u8(0, QBYTES), u8(1, 1, QBYTES)]),
    ("quantize_pack", "payload", ValueError, [u8(2, 2 * QBYTES)[:, ::2], misaligned(QBYTES)]),
    ("quantize_pack", "format", ValueError, ["sign", "float16", "INT8", ""]),
    ("quantize_pack", "inv_scale", ValueError, [ones(2), ones(0), ones(1, 1)]),
    ("quantize_pack", "inv_scale", TypeError, [ones(1, dtype=F64)]),
    ("quantize_pack", "status", TypeError, [torch.zeros(3, dtype=I64), torch.zeros(3)]),
    ("quantize_pack", "status", ValueError, [tensor(0, dtype=I32), i32(3, 1), i32(6)[::2]]),
    ("dequantize_sum", "payloads", TypeError, [i32(2, QBYTES)]),
    ("dequantize_sum", "payloads", ValueError, [u8(QBYTES), u8(2, QBYTES - 16), u8(2, 64)]),
    ("dequantize_sum", "payloads", ValueError, [u8(2, QBYTES + 8), u8(2, 0, QBYTES)]),
    ("dequantize_sum", "payloads", ValueError, [u8(4, QBYTES)[::2], misaligned(2, QBYTES)]),
    ("dequantize_sum", "out", TypeError, [ones(NUMEL, dtype=F64), ones(NUMEL, dtype=I64)]),
    ("dequantize_sum", "out", ValueError, [ones(10, 10), strided(NUMEL)]),
    ("dequantize_sum", "format", ValueError, ["sign", "float8"]),
    ("dequantize_sum", "out_scale", ValueError, [ones(2)]),
    ("dequantize_sum", "out_scale", TypeError, [ones(1, dtype=F16)]),
    ("dequantize_sum_pack", "payloads", TypeError, [i32(2, QBYTES)]),
    ("dequantize_sum_pack", "payloads", ValueError, [u8(QBYTES), u8(2, 1, QBYTES)]),
    ("dequantize_sum_pack", "payloads", ValueError, [u8(2, QBYTES - 16), u8(2, QBYTES + 8)]),
    ("dequantize_sum_pack", "payloads", ValueError, [u8(4, QBYTES)[::2], misaligned(2, QBYTES)]),
    ("dequantize_sum_pack", "residual", TypeError, [ones(NUMEL, dtype=F16)]),
    ("dequantize_sum_pack", "residual", ValueError, [ones(10, 10), strided(NUMEL)]),
    ("dequantize_sum_pack", "payload", TypeError, [ones(QBYTES)]),
    ("dequantize_sum_pack", "payload", ValueError, [u8(QBYTES - 16), u8(QBYTES + 8), u8(0)]),
    ("dequantize_sum_pack", "payload", ValueError, [u8(1, QBYTES), u8(2 * QBYTES)[::2]]),
    ("dequantize_sum_pack", "payload", ValueError, [misaligned(QBYTES)]),
    ("dequantize_sum_pack", "format", ValueError, ["sign"]),
    ("row_pack", "x", ValueError, [ones(ROWS), strided(ROWS, WIDTH)]),
    ("row_pack", "x", TypeError, [ones(ROWS, WIDTH, dtype=F64)]),
    ("row_pack", "k", ValueError, [0, -1, WIDTH + 1]),
    ("row_pack", "value_dtype", TypeError, [torch.int32]),
    ("row_gather", "x", ValueError, [ones(ROWS, WIDTH, 1), strided(ROWS, WIDTH)]),
    ("row_gather", "positions", TypeError, [i32(ROWS, K)]),
    ("row_gather", "positions", ValueError, [u8(ROWS, K + 1), u8(ROWS + 1, K), u8(ROWS * K)]),
    ("row_gather", "positions", ValueError, [u8(ROWS, 2 * K)[:, ::2]]),
    ("row_gather", "k", ValueError, [0, WIDTH + 1]),
    ("row_gather", "value_dtype", TypeError, [F64]),
    ("row_unpack", "values", TypeError, [ones(ROWS, K, dtype=I64)]),
    ("row_unpack", "values", ValueError, [strided(ROWS, K), ones(ROWS * K)]),
    ("row_unpack", "positions", ValueError, [u8(ROWS, K - 1), u8(ROWS - 1, K)]),
    ("row_unpack", "width", ValueError, [0, -1, 2**31]),
    ("row_unpack", "dtype", TypeError, [F64]),
    ("row_quantize", "x", ValueError, [ones(ROWS), strided(ROWS, WIDTH)]),
    ("row_quantize", "x", TypeError, [ones(ROWS, WIDTH, dtype=F64), ones(ROWS, WIDTH, dtype=I64)]),
    ("row_quantize", "format", ValueError, ["int3", "INT8", ""]),
    ("row_dequantize", "rows", TypeError, [torch.zeros(ROWS, WIDTH + 2)]),
    ("row_dequantize", "rows", ValueError, [u8(ROWS * (WIDTH + 2)), u8(ROWS, WIDTH)]),
    ("row_dequantize", "rows", ValueError, [u8(ROWS, WIDTH + 3), u8(ROWS, 2 * WIDTH + 4)[:, ::2]]),
    ("row_dequantize", "width", ValueError, [0, -1, 2**31]),
    ("row_dequantize", "format", ValueError, ["float8"]),
    ("row_dequantize", "dtype", TypeError, [F64]),
]
# Errors that name another argument than the one that was changed.
NAMED = [
    ("mask_pack", "capacity", CAPACITY + 100, "payload", ValueError),
    ("scatter_unpack", "capacity", CAPACITY + 100, "payloads", ValueError),
    ("quantize_pack", "residual", ones(NUMEL + 1), "grad", ValueError),
    ("quantize_pack", "format", "bfloat16", "payload", ValueError),
    ("dequantize_sum", "out", ones(1025), "payloads", ValueError),
    ("dequantize_sum", "format", "float32", "payloads", ValueError),
    ("dequantize_sum_pack", "residual", ones(1025), "payloads", ValueError),
    ("row_gather", "k", K + 1, "positions", ValueError),
    ("row_unpack", "width", K - 1, "values.shape[1]", ValueError),
    ("row_unpack", "width", 10, "positions", ValueError),
    ("row_pack", "x", torch.ones(ROWS, 0), "k", ValueError),
    ("row_quantize", "x", torch.ones(ROWS, 0), "x.shape[1]", ValueError),
    ("row_dequantize", "width", WIDTH + 1, "rows", ValueError),
    ("row_dequantize", "format", "int4", "rows", ValueError),
]
CASES = [(op, arg, value, arg, error) for op, arg, error, values in WRONG for value in values]
CASES += NAMED


def case_id(case):
    op, arg, value, *_ = case
    if isinstance(value, torch.Tensor):
        value = f"{bits.name(value.dtype)}{list(value.shape)}"
    return f"{op}-{arg}={value}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_wrong_argument(backend, case):
    op, arg, value, named, error = case
    if arg == "segments" and backend.device != "cpu" and value.dtype == I64 and value.dim() == 1:
        pytest.skip("the contents of segments are checked on the CPU only")
    args = arguments(op) | {arg: value}
    args = {name: placed(value, backend.device) for name, value in args.items()}
    refused(backend, op, args, named, error)


def test_neither_a_residual_nor_a_gradient(backend):
    args = arguments("quantize_pack") | {"residual": None, "grad": None}
    args = {name: placed(value, backend.device) for name, value in args.items()}
    text = refused(backend, "quantize_pack", args, "grad", ValueError)
    assert text == "dct::quantize_pack: grad must be given where residual is not, got None"
