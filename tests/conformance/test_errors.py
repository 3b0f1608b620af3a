"""Wrong arguments: every entry point names them in its error and writes nothing."""

import math

import pytest
import torch
from torch import ones

from conformance.arguments import (
    BF16,
    CAPACITY,
    F16,
    F64,
    I32,
    I64,
    NBYTES,
    NUMEL,
    PATCH_BYTES,
    QUANTIZED_BYTES,
    ROWS,
    U8,
    WIDTH,
    K,
    arguments,
    placed,
    refused,
)


def u8(*shape):
    return torch.zeros(*shape, dtype=U8)


def i32(*shape):
    return torch.zeros(*shape, dtype=I32)


def strided(*shape):
    return torch.ones(*shape[:-1], 2 * shape[-1])[..., ::2]


def misaligned(*shape):
    return u8(math.prod(shape) + 8)[8:].view(shape)


def payloads(nbytes):
    """Payloads with wrong dimensions, ranges, numbers of bytes, strides or alignment."""
    small = [u8(nbytes), u8(2, 0, nbytes), u8(2, nbytes - 16), u8(2, 64)]
    return [*small, u8(2, nbytes + 8), u8(4, nbytes)[::2], misaligned(2, nbytes)]


QBYTES = QUANTIZED_BYTES
VECTORS, SCALES = [ones(10, 10), strided(NUMEL)], [ones(2), ones(0), ones(1, 1)]
CUBES = [ones(10, 5, 2), strided(NUMEL), strided(10, 10)]
INTEGERS, DOUBLES = ones(NUMEL, dtype=I64), ones(NUMEL, dtype=F64)
NOT_16_BITS = [ones(NUMEL), ones(NUMEL, dtype=I32)]
NOT_FLAT = [ones(10, 10, dtype=BF16), ones(2 * NUMEL, dtype=BF16)[::2]]

# (op, argument, exception of the public function, wrong values)
WRONG = [
    ("sample_threshold", "grad", TypeError, [DOUBLES, INTEGERS]),
    ("sample_threshold", "grad", ValueError, VECTORS),
    ("sample_threshold", "residual", TypeError, [ones(NUMEL, dtype=BF16)]),
    ("sample_threshold", "residual", ValueError, [ones(NUMEL - 1), strided(NUMEL)]),
    ("sample_threshold", "density", ValueError, [0.0, -0.1, 1.5, math.inf, math.nan]),
    ("sample_threshold", "ranges", ValueError, [0, -1, 2**31]),
    ("sample_threshold", "max_samples", ValueError, [0, -1, 2**31]),
    ("sample_threshold", "inv_scale", ValueError, SCALES),
    ("sample_threshold", "inv_scale", TypeError, [ones(1, dtype=F64)]),
    ("mask_pack", "residual", TypeError, [ones(NUMEL, dtype=F16)]),
    ("mask_pack", "residual", ValueError, VECTORS),
    ("mask_pack", "grad", TypeError, [DOUBLES]),
    ("mask_pack", "grad", ValueError, [ones(NUMEL + 1), *VECTORS, ones(1).expand(NUMEL)]),
    ("mask_pack", "threshold", TypeError, [ones(2, dtype=F64)]),
    ("mask_pack", "threshold", ValueError, [ones(1), ones(3), ones(2, 1), strided(2)]),
    ("mask_pack", "payload", TypeError, [ones(2, NBYTES)]),
    ("mask_pack", "payload", ValueError, [u8(2, NBYTES + more) for more in (-16, -1, 16)]),
    ("mask_pack", "payload", ValueError, [u8(0), u8(0, NBYTES), u8(1, 2, NBYTES)]),
    ("mask_pack", "payload", ValueError, [u8(2, 2 * NBYTES)[:, ::2], misaligned(2, NBYTES)]),
    ("mask_pack", "seen", TypeError, [ones(2)]),
    ("mask_pack", "seen", ValueError, [i32(1), i32(4)[::2]]),
    ("mask_pack", "capacity", ValueError, [0, -1, 2**32]),
    ("mask_pack", "value_dtype", TypeError, [F16, torch.int8]),
    ("mask_pack", "inv_scale", ValueError, SCALES),
    ("mask_pack", "inv_scale", TypeError, [ones(1, dtype=BF16)]),
    ("scatter_unpack", "payloads", TypeError, [i32(2, NBYTES)]),
    ("scatter_unpack", "payloads", ValueError, [*payloads(NBYTES), u8(2, NBYTES + 16)]),
    ("scatter_unpack", "out", TypeError, [INTEGERS]),
    ("scatter_unpack", "out", ValueError, VECTORS),
    ("scatter_unpack", "capacity", ValueError, [0, 2**32]),
    ("scatter_unpack", "value_dtype", TypeError, [F16]),
    ("scatter_unpack", "out_scale", ValueError, SCALES),
    ("scatter_unpack", "out_scale", TypeError, [ones(1, dtype=F16)]),
    ("quantize_pack", "residual", TypeError, [ones(NUMEL, dtype=BF16)]),
    ("quantize_pack", "residual", ValueError, CUBES),
    ("quantize_pack", "grad", TypeError, [DOUBLES, INTEGERS]),
    ("quantize_pack", "grad", ValueError, [ones(NUMEL - 1), ones(10, 10), *CUBES]),
    ("quantize_pack", "grad", ValueError, [ones(1).expand(NUMEL)]),
    ("quantize_pack", "payload", TypeError, [ones(QBYTES)]),
    ("quantize_pack", "payload", ValueError, [u8(QBYTES - 16), u8(QBYTES + 8), u8(64), u8(0)]),
    ("quantize_pack", "payload", ValueError, [u8(0, QBYTES), u8(1, 1, QBYTES)]),
    ("quantize_pack", "payload", ValueError, [u8(2, 2 * QBYTES)[:, ::2], misaligned(QBYTES)]),
    ("quantize_pack", "format", ValueError, ["sign", "float16", "INT8", ""]),
    ("quantize_pack", "inv_scale", ValueError, SCALES),
    ("quantize_pack", "inv_scale", TypeError, [ones(1, dtype=F64)]),
    ("dequantize_sum", "payloads", TypeError, [i32(2, QBYTES)]),
    ("dequantize_sum", "payloads", ValueError, payloads(QBYTES)),
    ("dequantize_sum", "out", TypeError, [DOUBLES, INTEGERS]),
    ("dequantize_sum", "out", ValueError, CUBES),
    ("dequantize_sum", "format", ValueError, ["sign", "float8"]),
    ("dequantize_sum", "out_scale", ValueError, SCALES),
    ("dequantize_sum", "out_scale", TypeError, [ones(1, dtype=F16)]),
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
    ("row_quantize", "format", ValueError, ["int3", "ternary", "INT8", ""]),
    ("row_dequantize", "rows", TypeError, [torch.zeros(ROWS, WIDTH + 2)]),
    ("row_dequantize", "rows", ValueError, [u8(ROWS * (WIDTH + 2)), u8(ROWS, WIDTH)]),
    ("row_dequantize", "rows", ValueError, [u8(ROWS, WIDTH + 3), u8(ROWS, 2 * WIDTH + 4)[:, ::2]]),
    ("row_dequantize", "width", ValueError, [0, -1, 2**31]),
    ("row_dequantize", "format", ValueError, ["float8", "ternary"]),
    ("row_dequantize", "dtype", TypeError, [F64]),
    ("row_dequantize_sum", "rows", TypeError, [torch.zeros(2, ROWS, WIDTH + 2)]),
    ("row_dequantize_sum", "rows", ValueError, [u8(ROWS, WIDTH + 2), u8(2, ROWS, WIDTH)]),
    ("row_dequantize_sum", "rows", ValueError, [u8(2, 2 * ROWS, WIDTH + 2)[:, ::2]]),
    ("row_dequantize_sum", "width", ValueError, [0, -1, 2**31]),
    ("row_dequantize_sum", "format", ValueError, ["float8", "ternary"]),
    ("row_dequantize_sum", "dtype", TypeError, [F64]),
    ("diff_pack", "weights", TypeError, [DOUBLES, ones(NUMEL, dtype=F16)]),
    ("diff_pack", "weights", ValueError, [*VECTORS, ones(NUMEL - 1)]),
    ("diff_pack", "snapshot", TypeError, NOT_16_BITS),
    ("diff_pack", "snapshot", ValueError, NOT_FLAT),
    ("diff_pack", "patch", TypeError, [ones(PATCH_BYTES)]),
    ("diff_pack", "patch", ValueError, [u8(0), u8(PATCH_BYTES - 16), u8(PATCH_BYTES + 16)]),
    ("diff_pack", "patch", ValueError, [u8(1, PATCH_BYTES), u8(2 * PATCH_BYTES)[::2]]),
    ("diff_pack", "patch", ValueError, [misaligned(PATCH_BYTES)]),
    ("diff_pack", "checksums", TypeError, [i32(2), ones(2)]),
    ("diff_pack", "checksums", ValueError, [ones(n, dtype=I64) for n in (0, 1, 3)]),
    ("diff_pack", "checksums", ValueError, [ones(1, 2, dtype=I64), ones(4, dtype=I64)[::2]]),
    ("diff_pack", "capacity", ValueError, [0, -1, 2**32]),
    ("patch_check", "patch", TypeError, [i32(PATCH_BYTES)]),
    ("patch_check", "patch", ValueError, [u8(1, PATCH_BYTES), misaligned(PATCH_BYTES)]),
    ("patch_check", "numel", ValueError, [-1]),
    ("patch_check", "dtype", TypeError, [F64, torch.float32, I32]),
    ("patch_apply", "patch", TypeError, [i32(PATCH_BYTES)]),
    ("patch_apply", "patch", ValueError, [u8(2 * PATCH_BYTES)[::2], misaligned(PATCH_BYTES)]),
    ("patch_apply", "weights", TypeError, NOT_16_BITS),
    ("patch_apply", "weights", ValueError, NOT_FLAT),
    ("checksum", "weights", TypeError, NOT_16_BITS),
    ("checksum", "weights", ValueError, NOT_FLAT),
]
# (op, argument, wrong value, another argument that the error names)
NAMED = [
    ("mask_pack", "capacity", CAPACITY + 100, "payload"),
    ("mask_pack", "payload", u8(NBYTES), "threshold"),
    ("scatter_unpack", "capacity", CAPACITY + 100, "payloads"),
    ("quantize_pack", "residual", ones(NUMEL + 1), "grad"),
    ("quantize_pack", "residual", ones(10, 10), "grad"),
    ("quantize_pack", "format", "bfloat16", "payload"),
    ("dequantize_sum", "out", ones(1025), "payloads"),
    ("dequantize_sum", "out", ones(10, 10), "payloads"),
    ("dequantize_sum", "out", ones(1, 1025), "payloads"),
    ("dequantize_sum", "format", "float32", "payloads"),
    ("row_gather", "k", K + 1, "positions"),
    ("row_unpack", "width", K - 1, "values.shape[1]"),
    ("row_unpack", "width", 10, "positions"),
    ("row_pack", "x", torch.ones(ROWS, 0), "k"),
    ("row_quantize", "x", torch.ones(ROWS, 0), "x.shape[1]"),
    ("row_dequantize", "width", WIDTH + 1, "rows"),
    ("row_dequantize", "format", "int4", "rows"),
    ("row_dequantize_sum", "width", WIDTH + 1, "rows"),
    ("row_dequantize_sum", "format", "int4", "rows"),
    ("row_dequantize_sum", "rows", u8(0, ROWS, WIDTH + 2), "rows.shape[0]"),
    ("diff_pack", "snapshot", ones(NUMEL + 1, dtype=BF16), "weights"),
    ("diff_pack", "capacity", CAPACITY + 100, "patch"),
]
CASES = [(op, arg, values, arg, error) for op, arg, error, values in WRONG]
CASES += [(op, arg, [value], named, ValueError) for op, arg, value, named in NAMED]


@pytest.mark.parametrize(("op", "arg", "values", "named", "error"), CASES)
def test_wrong_arguments(backend, op, arg, values, named, error):
    for value in values:
        args = arguments(op) | {arg: value}
        args = {name: placed(value, backend.device) for name, value in args.items()}
        refused(backend, op, args, named, error)


def test_rows_of_another_shape(backend):
    """The rows of a matrix are ranges, so residual, grad and payload agree on their number."""
    for grad, residual, named in ((4, 5, "grad"), (4, 4, "payload"), (1, 2, "grad")):
        rows = {"grad": ones(grad, 100 // grad), "residual": ones(residual, 100 // residual)}
        args = arguments("quantize_pack") | rows | {"payload": u8(2, QBYTES)}
        args = {name: placed(value, backend.device) for name, value in args.items()}
        refused(backend, "quantize_pack", args, named, ValueError)


def test_error_texts_about_ranges(backend):
    """Ops raise errors with exactly the text of the public function."""
    for op, arg, value, rule in (
        ("mask_pack", "threshold", ones(3), "have 2 elements (one per range), got 3"),
        ("sample_threshold", "ranges", 0, "be in [1, 2147483647], got 0"),
    ):
        args = {n: placed(v, backend.device) for n, v in (arguments(op) | {arg: value}).items()}
        assert refused(backend, op, args, arg, ValueError) == f"dct::{op}: {arg} must {rule}"
