"""Every op: its schema, the shapes of its results for FakeTensors, the rules of its arguments.

Schemas are defined in Python, so that the ops exist (and run eagerly) even where no compiled
library could be built. Sizes are SymInt, because a plain int would make torch.compile recompile for
every new value.

The functions here check the arguments of an op and then call it; backends in Python run behind the
same checks. The compiled backends check again what memory safety needs, and say only a short rule
(csrc/bindings/ops.cpp). Metadata checks trace under torch.compile; addresses are checked only when
the op really runs.
"""

import zlib
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from . import checks, layout, row_layout

P = ParamSpec("P")

# Kept alive for the life of the process: a Library takes its registrations with it when collected.
library = torch.library.Library("dct", "DEF")

SCHEMAS: list[str] = []
CHECKS: dict[str, Callable[..., None]] = {}

INT32, FLOAT32, UINT8 = (torch.int32,), (torch.float32,), (torch.uint8,)
PAYLOAD_VALUES = tuple(layout.VALUE_DTYPE_CODES)
QUANTIZED = tuple(layout.QUANTIZED_CODES)


def define(
    schema: str, fake: Callable[..., Any] = lambda *_: None
) -> Callable[[Callable[P, None]], Callable[P, Any]]:
    """Define the op that the decorated function checks. The result checks and then runs it."""

    def with_check(check: Callable[P, None]) -> Callable[P, Any]:
        name = check.__name__
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        library.define(name + schema, tags=tags)
        SCHEMAS.append(name + schema)
        torch.library.register_fake(f"dct::{name}", fake, lib=library)
        CHECKS[name] = check
        run = getattr(torch.ops.dct, name).default  # which also makes dir(torch.ops.dct) list it

        def checked(*args: P.args, **kwargs: P.kwargs) -> Any:
            check(*args, **kwargs)
            return run(*args, **kwargs)

        return checked

    return with_check


@define(
    "(Tensor grad, Tensor residual, float density, SymInt ranges=1, SymInt max_samples=65536, "
    "SymInt seed=0, Tensor? inv_scale=None) -> Tensor",
    lambda grad, residual, density, ranges=1, *_: grad.new_empty(ranges, dtype=torch.float32),
)
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


@define(
    "(Tensor(a!) residual, Tensor grad, Tensor threshold, Tensor(b!) payload, Tensor(c!) seen, "
    "SymInt capacity, ScalarType value_dtype, Tensor? inv_scale=None) -> ()"
)
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
    ranges = _require_ranges(op, "payload", payload, 2)
    _require_entries(op, "payload", payload, residual.numel(), capacity, value_dtype, ranges)
    for name, tensor, dtypes in (("threshold", threshold, FLOAT32), ("seen", seen, INT32)):
        checks.require_tensor(op, name, tensor, dtypes, like=like)
        checks.require_numel(op, name, tensor, ranges, "(one per range)")
    checks.require_scale(op, "inv_scale", inv_scale, like)
    written = {"residual": residual, "payload": payload, "seen": seen}
    read = {"grad": grad, "threshold": threshold, "inv_scale": inv_scale}
    checks.memory(op, written, read, ("payload",))


def _statuses(payloads: Tensor, *_: object) -> Tensor:
    return payloads.new_empty(payloads.shape[0], dtype=torch.int32)


@define(
    "(Tensor payloads, Tensor(a!) out, SymInt capacity, ScalarType value_dtype, float scale=1.0, "
    "Tensor? out_scale=None) -> Tensor",
    _statuses,
)
def scatter_unpack(
    payloads: Tensor,
    out: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    scale: float = 1.0,
    out_scale: Tensor | None = None,
) -> None:
    op = "scatter_unpack"
    ranges = _require_sum(op, payloads, out, out_scale)
    _require_entries(op, "payloads", payloads, out.numel(), capacity, value_dtype, ranges)


@define(
    "(Tensor(a!)? residual, Tensor grad, Tensor(b!) payload, str format, Tensor? inv_scale=None) "
    "-> ()"
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
    checks.require_tensor(op, "grad", grad, checks.FLOATS, like=like)
    written = {"payload": payload}
    if residual is not None:
        checks.require_tensor(op, "residual", residual, FLOAT32, like=like)
        checks.require_numel(op, "grad", grad, residual.numel(), "like residual")
        written = {"residual": residual, "payload": payload}
    checks.require_scale(op, "inv_scale", inv_scale, like)
    ranges = _require_ranges(op, "payload", payload, 2)
    _require_rows(op, "payload", payload, grad.numel(), format, ranges)
    checks.memory(op, written, {"grad": grad, "inv_scale": inv_scale}, ("payload",))


@define(
    "(Tensor payloads, Tensor(a!) out, str format, float scale=1.0, Tensor? out_scale=None) "
    "-> Tensor",
    _statuses,
)
def dequantize_sum(
    payloads: Tensor,
    out: Tensor,
    format: str,
    scale: float = 1.0,
    out_scale: Tensor | None = None,
) -> None:
    op = "dequantize_sum"
    ranges = _require_sum(op, payloads, out, out_scale)
    _require_rows(op, "payloads", payloads, out.numel(), format, ranges)


@define(
    "(Tensor payloads, Tensor(a!) residual, Tensor(b!) payload, str format, float scale=1.0) "
    "-> Tensor",
    _statuses,
)
def dequantize_sum_pack(
    payloads: Tensor, residual: Tensor, payload: Tensor, format: str, scale: float = 1.0
) -> None:
    op, like = "dequantize_sum_pack", ("residual", residual)
    checks.require_tensor(op, "residual", residual, FLOAT32)
    for name, tensor, dim in (("payloads", payloads, 2), ("payload", payload, 1)):
        checks.require_tensor(op, name, tensor, UINT8, (dim,), like)
        _require_rows(op, name, tensor, residual.numel(), format, 1)
    written = {"residual": residual, "payload": payload}
    checks.memory(op, written, {"payloads": payloads}, ("payloads", "payload"))


@define(
    "(Tensor x, SymInt k, ScalarType value_dtype) -> (Tensor values, Tensor positions)",
    lambda x, k, value_dtype: (
        x.new_empty(x.shape[0], k, dtype=value_dtype),
        x.new_empty(x.shape[0], row_layout.position_bytes(x.shape[1], k), dtype=torch.uint8),
    ),
)
def row_pack(x: Tensor, k: int, value_dtype: torch.dtype) -> None:
    _require_top_k("row_pack", x, k, value_dtype)


@define(
    "(Tensor x, Tensor positions, SymInt k, ScalarType value_dtype) -> Tensor",
    lambda x, positions, k, value_dtype: x.new_empty(x.shape[0], k, dtype=value_dtype),
)
def row_gather(x: Tensor, positions: Tensor, k: int, value_dtype: torch.dtype) -> None:
    _require_top_k("row_gather", x, k, value_dtype)
    _require_positions("row_gather", positions, x.shape[1], k, ("x", x))


@define(
    "(Tensor values, Tensor positions, SymInt width, ScalarType dtype) -> Tensor",
    lambda values, positions, width, dtype: values.new_empty(values.shape[0], width, dtype=dtype),
)
def row_unpack(values: Tensor, positions: Tensor, width: int, dtype: torch.dtype) -> None:
    op = "row_unpack"
    checks.require_tensor(op, "values", values, checks.FLOATS, (2,))
    checks.require_int(op, "width", width, 1, 2**31 - 1)
    checks.require_int(op, "values.shape[1]", values.shape[1], 1, width)
    checks.require_dtype(op, "dtype", dtype, checks.FLOATS)
    _require_positions(op, positions, width, values.shape[1], ("values", values))


@define(
    "(Tensor x, str format) -> Tensor",
    lambda x, format: x.new_empty(
        x.shape[0], row_layout.row_bytes(x.shape[1], format), dtype=torch.uint8
    ),
)
def row_quantize(x: Tensor, format: str) -> None:
    op = "row_quantize"
    checks.require_tensor(op, "x", x, checks.FLOATS, (2,))
    checks.require_int(op, "x.shape[1]", x.shape[1], 1, 2**31 - 1)
    checks.require_choice(op, "format", format, row_layout.FORMATS)


@define(
    "(Tensor rows, SymInt width, str format, ScalarType dtype) -> Tensor",
    lambda rows, width, format, dtype: rows.new_empty(rows.shape[0], width, dtype=dtype),
)
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


OPS = tuple(CHECKS)

# A compiled library holds the digest of the schemas that it was written for (built_with.cpp).
SCHEMAS_DIGEST = f"{zlib.crc32(' '.join(SCHEMAS).encode()):08x}"


def _require_ranges(op: str, arg: str, payload: Tensor, dims: int) -> int:
    """The number of ranges of a payload, which has `dims` dimensions if it has ranges."""
    ranges = payload.shape[-2] if payload.dim() == dims else 1
    if ranges < 1:
        checks.fail(op, arg, "at least 1 range", ranges, verb="have")
    return ranges


def _require_sum(op: str, payloads: Tensor, out: Tensor, out_scale: Tensor | None) -> int:
    """The number of ranges of payloads that are summed."""
    like = ("out", out)
    checks.require_tensor(op, "out", out, checks.FLOATS)
    checks.require_tensor(op, "payloads", payloads, UINT8, (2, 3), like)
    checks.require_scale(op, "out_scale", out_scale, like)
    ranges = _require_ranges(op, "payloads", payloads, 3)
    read = {"payloads": payloads, "out_scale": out_scale}
    checks.memory(op, {"out": out}, read, ("payloads",))
    return ranges


def _require_entries(
    op: str,
    arg: str,
    payload: Tensor,
    numel: int,
    capacity: int,
    value_dtype: torch.dtype,
    ranges: int,
) -> None:
    """A payload of the entries that passed a threshold."""
    checks.require_int(op, "capacity", capacity, 1, 2**32 - 1)
    checks.require_dtype(op, "value_dtype", value_dtype, PAYLOAD_VALUES)
    nbytes = layout.payload_layout(numel, capacity, value_dtype, ranges).nbytes
    if payload.shape[-1] != nbytes:
        rule = f"{nbytes} bytes per range for {numel} elements and capacity {capacity}"
        checks.fail(op, arg, rule, payload.shape[-1], verb="have")


def _require_rows(op: str, arg: str, payload: Tensor, numel: int, format: str, ranges: int) -> None:
    """A payload of every entry. It may have room for more rows than the range has."""
    checks.require_choice(op, "format", format, QUANTIZED)
    nbytes = layout.quantized_payload_bytes(numel, format, ranges)
    if payload.shape[-1] < nbytes or payload.shape[-1] % 16:
        rule = f"{nbytes} bytes per range for {numel} elements, or a multiple of 16 above"
        checks.fail(op, arg, rule, payload.shape[-1], verb="have")


def _require_top_k(op: str, x: Tensor, k: int, value_dtype: torch.dtype) -> None:
    checks.require_tensor(op, "x", x, checks.FLOATS, (2,))
    checks.require_int(op, "k", k, 1, x.shape[1])
    checks.require_dtype(op, "value_dtype", value_dtype, checks.FLOATS)


def _require_positions(
    op: str, positions: Tensor, width: int, k: int, like: tuple[str, Tensor]
) -> None:
    checks.require_tensor(op, "positions", positions, UINT8, (2,), like)
    shape = [like[1].shape[0], row_layout.position_bytes(width, k)]
    if list(positions.shape) != shape:
        rule = f"shape {shape} for width {width} and k {k}"
        checks.fail(op, "positions", rule, list(positions.shape), verb="have")
