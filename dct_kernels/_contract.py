"""The rules of each op's arguments: one function per op, same name, same arguments.

The public functions call these before the op, and the backends in Python run behind them. Ops of
the compiled backends check the same when called directly, but say only a short rule
(csrc/bindings/contract.cpp). Metadata checks trace under torch.compile; addresses are checked
only when the op really runs.
"""

import torch
from torch import Tensor

from . import checks, layout, row_layout

INT32, FLOAT32, UINT8 = (torch.int32,), (torch.float32,), (torch.uint8,)
PAYLOAD_VALUES = tuple(layout.VALUE_DTYPE_CODES)
QUANTIZED = tuple(layout.QUANTIZED_CODES)


def sample_threshold(
    grad: Tensor,
    residual: Tensor,
    density: float,
    ranges: int = 1,
    max_samples: int = 65536,
    seed: int = 0,
    inv_scale: Tensor | None = None,
) -> None:
    op, like = "sample_threshold", ("grad", grad)
    checks.require_tensor(op, "grad", grad, checks.FLOATS)
    checks.require_tensor(op, "residual", residual, FLOAT32, like=like)
    checks.require_numel(op, "residual", residual, grad.numel(), "like grad")
    checks.require_density(op, density)
    checks.require_int(op, "ranges", ranges, 1, 2**31 - 1)
    checks.require_int(op, "max_samples", max_samples, 1, 2**31 - 1)
    checks.require_int(op, "seed", seed, -(2**63), 2**63 - 1)
    checks.require_scale(op, "inv_scale", inv_scale, like)


def mask_pack(
    residual: Tensor,
    grad: Tensor,
    threshold: Tensor,
    payload: Tensor,
    seen: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    inv_scale: Tensor | None = None,
) -> None:
    op, like = "mask_pack", ("residual", residual)
    checks.require_tensor(op, "residual", residual, FLOAT32)
    checks.require_tensor(op, "grad", grad, checks.FLOATS, like=like)
    checks.require_numel(op, "grad", grad, residual.numel(), "like residual")
    checks.require_tensor(op, "payload", payload, UINT8, (1, 2), like)
    checks.require_int(op, "capacity", capacity, 1, 2**32 - 1)
    checks.require_dtype(op, "value_dtype", value_dtype, PAYLOAD_VALUES)
    ranges = payload.shape[0] if payload.dim() == 2 else 1
    _payload_bytes(op, "payload", payload, residual.numel(), capacity, value_dtype, ranges)
    checks.require_tensor(op, "threshold", threshold, FLOAT32, like=like)
    checks.require_numel(op, "threshold", threshold, ranges, "(one per range)")
    checks.require_tensor(op, "seen", seen, INT32, like=like)
    checks.require_numel(op, "seen", seen, ranges, "(one per range)")
    checks.require_scale(op, "inv_scale", inv_scale, like)
    checks.memory(
        op,
        {"residual": residual, "payload": payload, "seen": seen},
        {"grad": grad, "threshold": threshold, "inv_scale": inv_scale},
        ("payload", payload),
    )


def scatter_unpack(
    payloads: Tensor,
    out: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    scale: float = 1.0,
    out_scale: Tensor | None = None,
) -> None:
    op, like = "scatter_unpack", ("out", out)
    checks.require_tensor(op, "out", out, checks.FLOATS)
    checks.require_tensor(op, "payloads", payloads, UINT8, (2, 3), like)
    checks.require_int(op, "capacity", capacity, 1, 2**32 - 1)
    checks.require_dtype(op, "value_dtype", value_dtype, PAYLOAD_VALUES)
    checks.require_scale(op, "out_scale", out_scale, like)
    ranges = payloads.shape[1] if payloads.dim() == 3 else 1
    _payload_bytes(op, "payloads", payloads, out.numel(), capacity, value_dtype, ranges)
    checks.memory(
        op,
        {"out": out},
        {"payloads": payloads, "out_scale": out_scale},
        ("payloads", payloads),
    )


def quantize_pack(
    residual: Tensor | None,
    grad: Tensor,
    payload: Tensor,
    format: str,
    inv_scale: Tensor | None = None,
) -> None:
    op, like = "quantize_pack", ("payload", payload)
    checks.require_tensor(op, "payload", payload, UINT8, (1, 2))
    if residual is not None:
        checks.require_tensor(op, "residual", residual, FLOAT32, like=like)
    checks.require_tensor(op, "grad", grad, checks.FLOATS, like=like)
    if residual is not None:
        checks.require_numel(op, "grad", grad, residual.numel(), "like residual")
    checks.require_choice(op, "format", format, QUANTIZED)
    checks.require_scale(op, "inv_scale", inv_scale, like)
    ranges = payload.shape[0] if payload.dim() == 2 else 1
    _quantized_bytes(op, "payload", payload, grad.numel(), format, ranges)
    checks.memory(
        op,
        {"payload": payload} if residual is None else {"residual": residual, "payload": payload},
        {"grad": grad, "inv_scale": inv_scale},
        ("payload", payload),
    )


def dequantize_sum(
    payloads: Tensor,
    out: Tensor,
    format: str,
    scale: float = 1.0,
    out_scale: Tensor | None = None,
) -> None:
    op, like = "dequantize_sum", ("out", out)
    checks.require_tensor(op, "out", out, checks.FLOATS)
    checks.require_tensor(op, "payloads", payloads, UINT8, (2, 3), like)
    checks.require_choice(op, "format", format, QUANTIZED)
    checks.require_scale(op, "out_scale", out_scale, like)
    ranges = payloads.shape[1] if payloads.dim() == 3 else 1
    _quantized_bytes(op, "payloads", payloads, out.numel(), format, ranges)
    checks.memory(
        op,
        {"out": out},
        {"payloads": payloads, "out_scale": out_scale},
        ("payloads", payloads),
    )


def dequantize_sum_pack(
    payloads: Tensor, residual: Tensor, payload: Tensor, format: str, scale: float = 1.0
) -> None:
    op, like = "dequantize_sum_pack", ("residual", residual)
    checks.require_tensor(op, "residual", residual, FLOAT32)
    checks.require_tensor(op, "payloads", payloads, UINT8, (2,), like)
    checks.require_tensor(op, "payload", payload, UINT8, like=like)
    checks.require_choice(op, "format", format, QUANTIZED)
    for name, tensor in {"payloads": payloads, "payload": payload}.items():
        _quantized_bytes(op, name, tensor, residual.numel(), format, 1)
    checks.memory(
        op,
        {"residual": residual, "payload": payload},
        {"payloads": payloads},
        ("payloads", payloads),
    )
    checks.memory(op, {"payload": payload}, {}, ("payload", payload))


def row_pack(x: Tensor, k: int, value_dtype: torch.dtype) -> None:
    op = "row_pack"
    checks.require_tensor(op, "x", x, checks.FLOATS, (2,))
    checks.require_int(op, "k", k, 1, x.shape[1])
    checks.require_dtype(op, "value_dtype", value_dtype, checks.FLOATS)


def row_gather(x: Tensor, positions: Tensor, k: int, value_dtype: torch.dtype) -> None:
    op = "row_gather"
    checks.require_tensor(op, "x", x, checks.FLOATS, (2,))
    checks.require_int(op, "k", k, 1, x.shape[1])
    checks.require_dtype(op, "value_dtype", value_dtype, checks.FLOATS)
    _positions(op, positions, x.shape[0], x.shape[1], k, ("x", x))


def row_unpack(values: Tensor, positions: Tensor, width: int, dtype: torch.dtype) -> None:
    op = "row_unpack"
    checks.require_tensor(op, "values", values, checks.FLOATS, (2,))
    checks.require_int(op, "width", width, 1, 2**31 - 1)
    checks.require_int(op, "values.shape[1]", values.shape[1], 1, width)
    checks.require_dtype(op, "dtype", dtype, checks.FLOATS)
    _positions(op, positions, values.shape[0], width, values.shape[1], ("values", values))


def row_quantize(x: Tensor, format: str) -> None:
    op = "row_quantize"
    checks.require_tensor(op, "x", x, checks.FLOATS, (2,))
    checks.require_int(op, "x.shape[1]", x.shape[1], 1, 2**31 - 1)
    checks.require_choice(op, "format", format, row_layout.FORMATS)


def row_dequantize(rows: Tensor, width: int, format: str, dtype: torch.dtype) -> None:
    op = "row_dequantize"
    checks.require_tensor(op, "rows", rows, UINT8, (2,))
    checks.require_int(op, "width", width, 1, 2**31 - 1)
    checks.require_choice(op, "format", format, row_layout.FORMATS)
    checks.require_dtype(op, "dtype", dtype, checks.FLOATS)
    row_bytes = row_layout.row_bytes(width, format)
    if rows.shape[1] != row_bytes:
        rule = f"{row_bytes} bytes per row for width {width} and format {format}"
        checks.fail(op, "rows", rule, rows.shape[1], verb="have")


def _payload_bytes(
    op: str,
    arg: str,
    payload: Tensor,
    numel: int,
    capacity: int,
    value_dtype: torch.dtype,
    ranges: int,
) -> None:
    if ranges < 1:
        checks.fail(op, arg, "at least 1 range", ranges, verb="have")
    nbytes = layout.payload_layout(numel, capacity, value_dtype, ranges).nbytes
    if payload.shape[-1] != nbytes:
        rule = f"{nbytes} bytes per range for {numel} elements and capacity {capacity}"
        checks.fail(op, arg, rule, payload.shape[-1], verb="have")


def _quantized_bytes(
    op: str, arg: str, payload: Tensor, numel: int, format: str, ranges: int
) -> None:
    """A payload may have room for more rows than it has: those of a longer range."""
    if ranges < 1:
        checks.fail(op, arg, "at least 1 range", ranges, verb="have")
    nbytes = layout.quantized_payload_bytes(numel, format, ranges)
    if payload.shape[-1] < nbytes or payload.shape[-1] % 16:
        rule = f"{nbytes} bytes per range for {numel} elements, or a multiple of 16 above"
        checks.fail(op, arg, rule, payload.shape[-1], verb="have")


def _positions(
    op: str, positions: Tensor, rows: int, width: int, k: int, like: tuple[str, Tensor]
) -> None:
    checks.require_tensor(op, "positions", positions, UINT8, (2,), like)
    row_bytes = row_layout.position_bytes(width, k)
    if positions.shape[0] != rows or positions.shape[1] != row_bytes:
        rule = f"shape [{rows}, {row_bytes}] for width {width} and k {k}"
        checks.fail(op, "positions", rule, list(positions.shape), verb="have")
