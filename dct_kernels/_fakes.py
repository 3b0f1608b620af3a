"""Shapes and dtypes of every op's results, for torch.compile and FakeTensors."""

import torch

from . import row_layout
from ._schemas import library


def sample_threshold(x, residual, segments, density, max_samples=65536, seed=0, inv_scale=None):
    return x.new_empty(segments.shape[0] - 1, dtype=torch.float32)


def track_threshold(threshold, seen, target, reference):
    return None


def mask_pack(
    residual,
    grad,
    segments,
    threshold,
    payload,
    seen,
    capacity,
    value_dtype,
    inv_scale=None,
    status=None,
):
    return None


def scatter_unpack(
    payloads, out, capacity, value_dtype, scale=1.0, accumulate=False, out_scale=None
):
    return payloads.new_empty(payloads.shape[0], dtype=torch.int32)


def row_pack(x, k, value_dtype):
    rows, width = x.shape
    position_bytes = row_layout.position_bytes(width, k)
    return (
        x.new_empty(rows, k, dtype=value_dtype),
        x.new_empty(rows, position_bytes, dtype=torch.uint8),
    )


def row_gather(x, positions, k, value_dtype):
    return x.new_empty(x.shape[0], k, dtype=value_dtype)


def row_unpack(values, positions, width, dtype):
    return values.new_empty(values.shape[0], width, dtype=dtype)


def row_quantize(x, format):
    rows, width = x.shape
    return x.new_empty(rows, row_layout.row_bytes(width, format), dtype=torch.uint8)


def row_dequantize(rows, width, format, dtype):
    return rows.new_empty(rows.shape[0], width, dtype=dtype)


for _fake in (
    sample_threshold,
    track_threshold,
    mask_pack,
    scatter_unpack,
    row_pack,
    row_gather,
    row_unpack,
    row_quantize,
    row_dequantize,
):
    torch.library.register_fake(f"dct::{_fake.__name__}", _fake, lib=library)
