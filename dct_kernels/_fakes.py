"""Shapes and dtypes of every op's results, for torch.compile and FakeTensors."""

import torch
from torch import Tensor

from . import row_layout
from ._schemas import library


def sample_threshold(
    grad: Tensor, residual: Tensor, density: float, ranges: int = 1, *_: object
) -> Tensor:
    return grad.new_empty(ranges, dtype=torch.float32)


def mask_pack(*_: object) -> None:
    return None


def scatter_unpack(payloads: Tensor, *_: object) -> Tensor:
    return payloads.new_empty(payloads.shape[0], dtype=torch.int32)


def quantize_pack(*_: object) -> None:
    return None


def dequantize_sum(payloads: Tensor, *_: object) -> Tensor:
    return payloads.new_empty(payloads.shape[0], dtype=torch.int32)


def dequantize_sum_pack(payloads: Tensor, *_: object) -> Tensor:
    return payloads.new_empty(payloads.shape[0], dtype=torch.int32)


def row_pack(x: Tensor, k: int, value_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    position_bytes = row_layout.position_bytes(width, k)
    return (
        x.new_empty(rows, k, dtype=value_dtype),
        x.new_empty(rows, position_bytes, dtype=torch.uint8),
    )


def row_gather(x: Tensor, positions: Tensor, k: int, value_dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[0], k, dtype=value_dtype)


def row_unpack(values: Tensor, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return values.new_empty(values.shape[0], width, dtype=dtype)


def row_quantize(x: Tensor, format: str) -> Tensor:
    rows, width = x.shape
    return x.new_empty(rows, row_layout.row_bytes(width, format), dtype=torch.uint8)


def row_dequantize(rows: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(rows.shape[0], width, dtype=dtype)


for _fake in (
    sample_threshold,
    mask_pack,
    scatter_unpack,
    quantize_pack,
    dequantize_sum,
    dequantize_sum_pack,
    row_pack,
    row_gather,
    row_unpack,
    row_quantize,
    row_dequantize,
):
    torch.library.register_fake(f"dct::{_fake.__name__}", _fake, lib=library)
