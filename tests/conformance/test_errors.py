"""Wrong arguments: an error that names them on every way in, and nothing written."""

import math

import pytest
import torch

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


# (op, argument, wrong value, exception of the public function)
WRONG = [
    ("sample_threshold", "x", torch.ones(NUMEL, dtype=F64), TypeError),
    ("sample_threshold", "x", torch.ones(NUMEL, dtype=I64), TypeError),
    ("sample_threshold", "x", torch.ones(10, 10), ValueError),
    ("sample_threshold", "x", strided(NUMEL), ValueError),
    ("sample_threshold", "residual", torch.ones(NUMEL, dtype=BF16), TypeError),
    ("sample_threshold", "residual", torch.ones(NUMEL - 1), ValueError),
    ("sample_threshold", "residual", strided(NUMEL), ValueError),
    ("sample_threshold", "segments", segments().int(), TypeError),
    ("sample_threshold", "segments", segments().view(1, 3), ValueError),
    ("sample_threshold", "segments", torch.empty(0, dtype=I64), ValueError),
    ("sample_threshold", "segments", torch.tensor([0]), ValueError),
    ("sample_threshold", "segments", torch.tensor([1, NUMEL]), ValueError),
    ("sample_threshold", "segments", torch.tensor([0, NUMEL - 1]), ValueError),
    ("sample_threshold", "segments", torch.tensor([0, NUMEL + 1]), ValueError),
    ("sample_threshold", "segments", torch.tensor([0, 60, 40, NUMEL]), ValueError),
    ("sample_threshold", "segments", torch.tensor([0, -5, NUMEL]), ValueError),
    ("sample_threshold", "segments", torch.tensor([0, 2**62, NUMEL]), ValueError),
    ("sample_threshold", "density", 0.0, ValueError),
    ("sample_threshold", "density", -0.1, ValueError),
    ("sample_threshold", "density", 1.5, ValueError),
    ("sample_threshold", "density", math.inf, ValueError),
    ("sample_threshold", "density", math.nan, ValueError),
    ("sample_threshold", "max_samples", 0, ValueError),
    ("sample_threshold", "max_samples", -1, ValueError),
    ("sample_threshold", "max_samples", 2**31, ValueError),
    ("sample_threshold", "inv_scale", torch.ones(2), ValueError),
    ("sample_threshold", "inv_scale", torch.ones(1, 1), ValueError),
    ("sample_threshold", "inv_scale", torch.ones(1, dtype=F64), TypeError),
    ("mask_pack", "residual", torch.ones(NUMEL, dtype=F16), TypeError),
    ("mask_pack", "residual", torch.ones(10, 10), ValueError),
    ("mask_pack", "residual", strided(NUMEL), ValueError),
    ("mask_pack", "grad", torch.ones(NUMEL, dtype=F64), TypeError),
    ("mask_pack", "grad", torch.ones(NUMEL + 1), ValueError),
    ("mask_pack", "grad", torch.ones(10, 10), ValueError),
    ("mask_pack", "grad", strided(NUMEL), ValueError),
    ("mask_pack", "grad", torch.ones(1).expand(NUMEL), ValueError),
    ("mask_pack", "segments", segments().int(), TypeError),
    ("mask_pack", "segments", torch.tensor([0, 101, NUMEL]), ValueError),
    ("mask_pack", "segments", torch.tensor([0, 40, 99]), ValueError),
    ("mask_pack", "segments", torch.tensor([1, 40, NUMEL]), ValueError),
    ("mask_pack", "segments", torch.tensor([0, -1, NUMEL]), ValueError),
    ("mask_pack", "threshold", torch.ones(3), ValueError),
    ("mask_pack", "threshold", torch.ones(2, dtype=F64), TypeError),
    ("mask_pack", "payload", torch.ones(NBYTES), TypeError),
    ("mask_pack", "payload", u8(NBYTES - 1), ValueError),
    ("mask_pack", "payload", u8(NBYTES + 16), ValueError),
    ("mask_pack", "payload", u8(NBYTES - 16), ValueError),
    ("mask_pack", "payload", u8(0), ValueError),
    ("mask_pack", "payload", u8(0, NBYTES), ValueError),
    ("mask_pack", "payload", u8(1, 1, NBYTES), ValueError),
    ("mask_pack", "payload", u8(2, 2 * NBYTES)[:, ::2], ValueError),
    ("mask_pack", "payload", misaligned(NBYTES), ValueError),
    ("mask_pack", "seen", torch.ones(2), TypeError),
    ("mask_pack", "seen", i32(1), ValueError),
    ("mask_pack", "seen", i32(4)[::2], ValueError),
    ("mask_pack", "capacity", 0, ValueError),
    ("mask_pack", "capacity", -1, ValueError),
    ("mask_pack", "capacity", 2**32, ValueError),
    ("mask_pack", "value_dtype", F16, TypeError),
    ("mask_pack", "value_dtype", torch.int8, TypeError),
    ("mask_pack", "inv_scale", torch.ones(3), ValueError),
    ("mask_pack", "inv_scale", torch.ones(1, dtype=BF16), TypeError),
    ("mask_pack", "status", torch.zeros(3, dtype=I64), TypeError),
    ("mask_pack", "status", torch.zeros(3), TypeError),
    ("mask_pack", "status", torch.tensor(0, dtype=I32), ValueError),
    ("mask_pack", "status", i32(3, 1), ValueError),
    ("mask_pack", "status", i32(6)[::2], ValueError),
    ("scatter_unpack", "payloads", i32(2, NBYTES), TypeError),
    ("scatter_unpack", "payloads", u8(NBYTES), ValueError),
    ("scatter_unpack", "payloads", u8(2, NBYTES - 16), ValueError),
    ("scatter_unpack", "payloads", u8(2, NBYTES + 16), ValueError),
    ("scatter_unpack", "payloads", u8(2, 0, NBYTES), ValueError),
    ("scatter_unpack", "payloads", u8(4, NBYTES)[::2], ValueError),
    ("scatter_unpack", "payloads", misaligned(2, NBYTES), ValueError),
    ("scatter_unpack", "out", torch.ones(NUMEL, dtype=I64), TypeError),
    ("scatter_unpack", "out", torch.ones(10, 10), ValueError),
    ("scatter_unpack", "out", strided(NUMEL), ValueError),
    ("scatter_unpack", "capacity", 0, ValueError),
    ("scatter_unpack", "capacity", 2**32, ValueError),
    ("scatter_unpack", "value_dtype", F16, TypeError),
    ("scatter_unpack", "out_scale", torch.ones(2), ValueError),
    ("scatter_unpack", "out_scale", torch.ones(1, dtype=F16), TypeError),
    ("row_pack", "x", torch.ones(ROWS), ValueError),
    ("row_pack", "x", torch.ones(ROWS, WIDTH, dtype=F64), TypeError),
    ("row_pack", "x", strided(ROWS, WIDTH), ValueError),
    ("row_pack", "k", 0, ValueError),
    ("row_pack", "k", -1, ValueError),
    ("row_pack", "k", WIDTH + 1, ValueError),
    ("row_pack", "value_dtype", torch.int32, TypeError),
    ("row_gather", "x", torch.ones(ROWS, WIDTH, 1), ValueError),
    ("row_gather", "x", strided(ROWS, WIDTH), ValueError),
    ("row_gather", "positions", i32(ROWS, K), TypeError),
    ("row_gather", "positions", u8(ROWS, K + 1), ValueError),
    ("row_gather", "positions", u8(ROWS + 1, K), ValueError),
    ("row_gather", "positions", u8(ROWS * K), ValueError),
    ("row_gather", "positions", u8(ROWS, 2 * K)[:, ::2], ValueError),
    ("row_gather", "k", 0, ValueError),
    ("row_gather", "k", WIDTH + 1, ValueError),
    ("row_gather", "value_dtype", F64, TypeError),
    ("row_unpack", "values", torch.ones(ROWS, K, dtype=I64), TypeError),
    ("row_unpack", "values", strided(ROWS, K), ValueError),
    ("row_unpack", "values", torch.ones(ROWS * K), ValueError),
    ("row_unpack", "positions", u8(ROWS, K - 1), ValueError),
    ("row_unpack", "positions", u8(ROWS - 1, K), ValueError),
    ("row_unpack", "width", 0, ValueError),
    ("row_unpack", "width", -1, ValueError),
    ("row_unpack", "width", 2**31, ValueError),
    ("row_unpack", "dtype", F64, TypeError),
    ("row_quantize", "x", torch.ones(ROWS), ValueError),
    ("row_quantize", "x", torch.ones(ROWS, WIDTH, dtype=F64), TypeError),
    ("row_quantize", "x", torch.ones(ROWS, WIDTH, dtype=I64), TypeError),
    ("row_quantize", "x", strided(ROWS, WIDTH), ValueError),
    ("row_quantize", "format", "int3", ValueError),
    ("row_quantize", "format", "INT8", ValueError),
    ("row_quantize", "format", "", ValueError),
    ("row_dequantize", "rows", torch.zeros(ROWS, WIDTH + 2), TypeError),
    ("row_dequantize", "rows", u8(ROWS * (WIDTH + 2)), ValueError),
    ("row_dequantize", "rows", u8(ROWS, WIDTH), ValueError),
    ("row_dequantize", "rows", u8(ROWS, WIDTH + 3), ValueError),
    ("row_dequantize", "rows", u8(ROWS, 2 * WIDTH + 4)[:, ::2], ValueError),
    ("row_dequantize", "width", 0, ValueError),
    ("row_dequantize", "width", -1, ValueError),
    ("row_dequantize", "width", 2**31, ValueError),
    ("row_dequantize", "format", "float8", ValueError),
    ("row_dequantize", "dtype", F64, TypeError),
]
# Errors that name another argument than the one that was changed.
NAMED = [
    ("mask_pack", "capacity", CAPACITY + 100, "payload", ValueError),
    ("scatter_unpack", "capacity", CAPACITY + 100, "payloads", ValueError),
    ("row_gather", "k", K + 1, "positions", ValueError),
    ("row_unpack", "width", K - 1, "values.shape[1]", ValueError),
    ("row_unpack", "width", 10, "positions", ValueError),
    ("row_pack", "x", torch.ones(ROWS, 0), "k", ValueError),
    ("row_quantize", "x", torch.ones(ROWS, 0), "x.shape[1]", ValueError),
    ("row_dequantize", "width", WIDTH + 1, "rows", ValueError),
    ("row_dequantize", "format", "int4", "rows", ValueError),
]
CASES = [(op, arg, value, arg, error) for op, arg, value, error in WRONG] + NAMED


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
