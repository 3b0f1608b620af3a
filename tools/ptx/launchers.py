"""The ops that call the launchers through module.cpp, with the signatures of torch.ops.dct, on CPU
tensors."""

import ctypes
import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch

from dct_kernels import row_layout
from dct_kernels._load import checked
from dct_kernels._schemas import OPS
from dct_kernels.layout import QUANTIZED_CODES

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
Argument = torch.Tensor | torch.dtype | str | int | float | None


def to_c(argument: Argument):
    if isinstance(argument, torch.Tensor):
        return ctypes.c_int64(argument.data_ptr())
    if isinstance(argument, torch.dtype | str):
        return ctypes.c_int64(_DTYPES[argument])
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return ctypes.c_int64(0 if argument is None else int(argument))


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that looks unlike any result, so that what a kernel forgets to write is seen, and that
    no kernel may read before it is written."""
    out = torch.empty(shape, dtype=dtype)
    out.view(torch.uint8).fill_(0xAB)
    out.is_poisoned = True
    return out


def sample_threshold(
    call, grad, residual, density, ranges=1, max_samples=65536, seed=0, inv_scale=None
):
    threshold = poisoned(ranges, dtype=torch.float32)
    source = grad, grad.dtype, residual, grad.numel(), ranges
    picks = float(density), max_samples, seed & 0xFFFFFFFF
    call("sample_threshold", *source, *picks, inv_scale, threshold)
    return threshold


def mask_pack(
    call, residual, grad, threshold, payload, seen, capacity, value_dtype, inv_scale=None
):
    ranges = payload.shape[0] if payload.dim() == 2 else 1
    source = residual, grad, grad.dtype, grad.numel(), ranges, threshold
    call("mask_pack", *source, seen, payload, capacity, value_dtype, inv_scale)


def scatter_unpack(call, payloads, out, capacity, value_dtype, scale=1.0, out_scale=None):
    status = poisoned(payloads.shape[0], dtype=torch.int32)
    ranges = payloads.shape[1] if payloads.dim() == 3 else 1
    source = payloads, payloads.shape[0], ranges, capacity, value_dtype
    to = out, out.dtype, out.numel(), float(scale)
    call("scatter_unpack", *source, *to, out_scale, status)
    return status


def quantize_pack(call, residual, grad, payload, format, inv_scale=None):
    ranges = payload.shape[0] if payload.dim() == 2 else 1
    to = payload, ranges, payload.shape[-1], QUANTIZED_CODES[format]
    call("quantize_pack", residual, grad, grad.dtype, grad.numel(), *to, inv_scale)


def dequantize_sum(call, payloads, out, format, scale=1.0, out_scale=None):
    status = poisoned(payloads.shape[0], dtype=torch.int32)
    ranges = payloads.shape[1] if payloads.dim() == 3 else 1
    source = payloads, payloads.shape[0], ranges, payloads.shape[-1], QUANTIZED_CODES[format]
    call("dequantize_sum", *source, out, out.dtype, out.numel(), float(scale), out_scale, status)
    return status


def dequantize_sum_pack(call, payloads, residual, payload, format, scale=1.0):
    status = poisoned(payloads.shape[0], dtype=torch.int32)
    to = residual, residual.numel(), payload, payload.numel(), QUANTIZED_CODES[format]
    call("dequantize_sum_pack", payloads, *payloads.shape, *to, float(scale), status)
    return status


def row_pack(call, x, k, value_dtype):
    rows, width = x.shape
    values = poisoned(rows, k, dtype=value_dtype)
    positions = poisoned(rows, row_layout.position_bytes(width, k), dtype=torch.uint8)
    call("row_pack", x, x.dtype, rows, width, k, values, value_dtype, positions)
    return values, positions


def row_gather(call, x, positions, k, value_dtype):
    values = poisoned(x.shape[0], k, dtype=value_dtype)
    call("row_gather", x, x.dtype, positions, *x.shape, k, values, value_dtype)
    return values


def row_unpack(call, values, positions, width, dtype):
    rows, k = values.shape
    out = poisoned(rows, width, dtype=dtype)
    call("row_unpack", values, values.dtype, positions, rows, width, k, out, dtype)
    return out


_FORMATS = row_layout.FORMATS  # in the order of their codes


def row_quantize(call, x, format):
    rows, width = x.shape
    out = poisoned(rows, row_layout.row_bytes(width, format), dtype=torch.uint8)
    call("row_quantize", x, x.dtype, rows, width, _FORMATS.index(format), out)
    return out


def row_dequantize(call, rows, width, format, dtype):
    out = poisoned(rows.shape[0], width, dtype=dtype)
    call("row_dequantize", rows, rows.shape[0], width, _FORMATS.index(format), out, dtype)
    return out


def launchers(call: Callable[..., None]) -> SimpleNamespace:
    """The ops. `call` takes the name of an op and the fields of its arguments in common/ops.h.

    Results are allocated here, poisoned.
    """
    ops = SimpleNamespace(**{op: functools.partial(globals()[op], call) for op in OPS})
    return SimpleNamespace(**{op: checked(ops, op) for op in OPS}, device="cpu")
