"""The ops on payloads: sparse ones with entries that pass a threshold, dense ones with all entries.

The body of each function only checks its arguments. The decorator `define` adds the call of the op.
"""

# mypy: disable-error-code="return"

import torch
from torch import Tensor

from . import checks, layout
from ._ops import define
from .checks import FLOAT32, FLOATS, INT32, UINT8


def _statuses(payloads: Tensor, out: Tensor, *_: object) -> Tensor:
    return payloads.new_empty(payloads.shape[:1] + out.shape[:-1], dtype=torch.int32)


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
) -> Tensor:
    """Return, per range, the threshold that a fraction `density` of entries reaches.

    An entry has the magnitude |residual + grad * inv_scale|. In a range of n <= `max_samples`
    elements, the threshold is the k-th largest magnitude, k = clamp(ceil(density * n), 1, n). A
    longer range is divided into `max_samples` equal strata, and the op uses one sampled element of
    each stratum instead. docs/reference/ops.md states the error of a sampled threshold.

    Args:
        grad: float32, bfloat16 or float16 [numel].
        residual: float32 [numel].
        density: fraction to select, in (0, 1].
        ranges: number of ranges R, 1 to 2**31 - 1.
        max_samples: samples per range, 1 to 2**31 - 1.
        seed: seed of the hash that selects the samples, modulo 2**32. A CUDA graph captures it.
        inv_scale: float32, one element, or None.

    Returns:
        float32 [R]. NaN ranks as infinity. The threshold of an empty range is +inf.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: DCT (arXiv 2010.08899) sets a threshold once in thousands of steps. Sampling is from DGC
    (arXiv 1712.01887). This project adds the strata and the hash.

    >>> sample_threshold(torch.arange(10.0), torch.zeros(10), density=0.2)
    tensor([8.])
    """
    op, like = "sample_threshold", ("grad", grad)
    checks.require_tensor(op, "grad", grad, FLOATS)
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
    """Apply error feedback and pack the entries that reach a threshold, in one pass.

    acc = residual + grad * inv_scale. An entry passes if not (|acc| < the threshold of its range)
    and acc != 0. So NaN and Inf always pass, and zeros never pass. The payload of a range holds the
    first `capacity` entries of the range that pass, in order of position. The residual becomes
    acc - value for these entries, and acc for all other entries. So value + residual == acc bit for
    bit, and an entry that does not fit stays in the residual. If acc is not finite, the residual
    keeps its old value, or becomes 0 if the old value is not finite. If the threshold is negative
    or NaN, all nonzero entries pass. Mutates `residual`, `payload` and `seen`.

    Args:
        residual: float32 [numel], read and written.
        grad: float32, bfloat16 or float16 [numel].
        threshold: float32 [R].
        payload: uint8 [nbytes] or [R, nbytes], 16-byte aligned, nbytes from `payload_layout`. Bytes
            after the entries are not written.
        seen: int32 [R], written: number of entries of each range that passed, at most 2**31 - 1.
        capacity: maximum number of entries per range, 1 to 2**32 - 1.
        value_dtype: torch.float32, or torch.bfloat16 (rounded to nearest even; finite values
            saturate).
        inv_scale: float32, one element, or None.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: DCT (arXiv 2010.08899), data-parallel part. This project defines the payload format.

    >>> residual, grad = torch.zeros(4), torch.tensor([0.1, -3.0, 0.2, 5.0])
    >>> layout = payload_layout(4, capacity=2, value_dtype=torch.float32)
    >>> payload = torch.empty(layout.nbytes, dtype=torch.uint8)
    >>> seen = torch.empty(1, dtype=torch.int32)
    >>> mask_pack(residual, grad, torch.tensor([1.0]), payload, seen, 2, torch.float32)
    >>> residual, seen
    (tensor([0.1000, 0.0000, 0.2000, 0.0000]), tensor([2], dtype=torch.int32))
    """
    op, like = "mask_pack", ("residual", residual)
    checks.require_tensor(op, "residual", residual, FLOAT32)
    checks.require_tensor(op, "grad", grad, FLOATS, like=like)
    checks.require_numel(op, "grad", grad, residual.numel(), "like residual")
    checks.require_tensor(op, "payload", payload, UINT8, (1, 2), like)
    ranges = _require_entries(op, "payload", payload, 2, residual.numel(), capacity, value_dtype)
    for name, tensor, dtypes in (("threshold", threshold, FLOAT32), ("seen", seen, INT32)):
        checks.require_tensor(op, name, tensor, dtypes, like=like)
        checks.require_numel(op, name, tensor, ranges, "(one per range)")
    checks.require_scale(op, "inv_scale", inv_scale, like)
    written = {"residual": residual, "payload": payload, "seen": seen}
    read = {"grad": grad, "threshold": threshold, "inv_scale": inv_scale}
    checks.memory(op, written, read, ("payload",))


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
) -> Tensor:
    """Sum the sparse payloads of P ranks. The result is bitwise equal on all ranks.

    out[i] = +0.0 + factor * sum, rounded once to the dtype of `out`. The sum is in float32, over
    ranks in order from +0.0, and factor = float32(scale) * out_scale. If a header has the overflow
    and the non-finite flag, a NaN or Inf may not have fitted into the payload, so element 0 of the
    range becomes NaN. The op validates every payload. It ignores a payload with an invalid header,
    and skips an invalid block. Mutates `out` (all elements are written).

    Args:
        payloads: uint8 [P, nbytes] or [P, R, nbytes], 16-byte aligned.
        out: float32, bfloat16 or float16 [numel], written.
        capacity: as given to mask_pack.
        value_dtype: as given to mask_pack.
        scale: 1 / P for a mean. Rounded to float32 once.
        out_scale: float32, one element, or None.

    Returns:
        status int32 [P]: 0, or a sum of the flags 1 (invalid header), 2 (block starts not ascending
        or past the count) and 4 (positions not ascending or outside their block).

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: DCT (arXiv 2010.08899), data-parallel part. This project defines the payload format.

    >>> payload = torch.zeros(1, payload_layout(4, 2, torch.float32).nbytes, dtype=torch.uint8)
    >>> scatter_unpack(payload, torch.empty(4), 2, torch.float32)  # the header is invalid
    tensor([1], dtype=torch.int32)
    """
    op = "scatter_unpack"
    _require_sum(op, payloads, out, scale, out_scale, 1)
    _require_entries(op, "payloads", payloads, 3, out.numel(), capacity, value_dtype)


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
    """Apply error feedback and quantize all entries, in one pass over memory.

    acc = residual + grad * inv_scale, or grad * inv_scale without a residual. The payload holds all
    entries, and the residual becomes acc - value. So value + residual == acc exactly, except that
    in "ternary" the residual is rounded once. Mutates `residual` and `payload`.

    Formats, with bits per entry: "float32" 32 (the residual becomes 0), "bfloat16" 16 (rounded to
    nearest even; finite values saturate), "int8" 8.25, "int4" 4.25 and "ternary" 1.875. The last
    three encode each group of 64 entries like a quantized row, with one bfloat16 scale
    (docs/reference/payload.md).

    In "float32" and "bfloat16", values can be NaN or Inf. In the other formats, all values of a
    group with a NaN or Inf become NaN. If a value is NaN or Inf, the residual keeps its old value,
    or becomes 0 if the old value is not finite. A NaN or Inf also sets the non-finite flag.

    Args:
        residual: float32, with the shape of `grad`, read and written, or None for no error
            feedback.
        grad: float32, bfloat16 or float16, [numel], or [R, n] for R ranges of n elements each.
        payload: uint8 [nbytes] or [R, nbytes], 16-byte aligned, nbytes from
            `quantized_payload_bytes` or a larger multiple of 16. Bytes after the last row are not
            written.
        format: one of the formats above.
        inv_scale: float32, one element, or None.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: error feedback as in 1-bit SGD (Interspeech 2014) and EF-SGD (arXiv 1901.09847), ternary
    from TWN (arXiv 1605.04711). This project defines the formats.

    >>> residual, payload = torch.zeros(2), torch.empty(608, dtype=torch.uint8)
    >>> quantize_pack(residual, torch.tensor([7.0, 2.25]), payload, "int4")
    >>> residual
    tensor([0.0000, 0.2500])
    """
    op, like = "quantize_pack", ("payload", payload)
    checks.require_tensor(op, "payload", payload, UINT8, (1, 2))
    dims: tuple[int, ...] = (1, 2)
    written = {"payload": payload}
    if residual is not None:
        checks.require_tensor(op, "residual", residual, FLOAT32, dims, like)
        dims, written = (residual.dim(),), {"residual": residual, "payload": payload}
    checks.require_tensor(op, "grad", grad, FLOATS, dims, like)
    if residual is not None and grad.shape != residual.shape:
        rule = f"shape {list(residual.shape)} like residual"
        checks.fail(op, "grad", rule, list(grad.shape), verb="have")
    checks.require_scale(op, "inv_scale", inv_scale, like)
    _require_rows(op, "payload", payload, 2, ("grad", grad), format)
    checks.memory(op, written, {"grad": grad, "inv_scale": inv_scale}, ("payload",))


@define(
    "(Tensor payloads, Tensor(a!) out, str format, float scale=1.0, Tensor? out_scale=None) "
    "-> Tensor",
    _statuses,
)
def dequantize_sum(
    payloads: Tensor, out: Tensor, format: str, scale: float = 1.0, out_scale: Tensor | None = None
) -> Tensor:
    """Sum the dense payloads of P ranks. The result is bitwise equal on all ranks.

    out[i] = factor * sum, rounded once to the dtype of `out`. The sum is in float32, over ranks in
    order from +0.0, and factor = float32(scale) * out_scale. The op ignores a payload with an
    invalid header. The other bytes need no validation, because all bytes can be decoded. Mutates
    `out` (all elements are written).

    Args:
        payloads: uint8 [P, nbytes] or [P, R, nbytes], 16-byte aligned.
        out: float32, bfloat16 or float16, written; [numel], or [R, n] for R ranges of n elements.
        format: as given to `quantize_pack`.
        scale: 1 / P for a mean. Rounded to float32 once.
        out_scale: float32, one element, or None.

    Returns:
        status int32 [P], or [P, R] if `out` is two-dimensional: 0, or 1 if a header is invalid.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: see `quantize_pack`.

    >>> payload = torch.zeros(1, quantized_payload_bytes(4, "int8"), dtype=torch.uint8)
    >>> dequantize_sum(payload, torch.empty(4), "int8")  # the header is invalid
    tensor([1], dtype=torch.int32)
    """
    op = "dequantize_sum"
    _require_sum(op, payloads, out, scale, out_scale, 2)
    _require_rows(op, "payloads", payloads, 3, ("out", out), format)


def _require_sum(
    op: str, payloads: Tensor, out: Tensor, scale: float, out_scale: Tensor | None, dims: int
) -> None:
    like = ("out", out)
    checks.require_number(op, "scale", scale)
    checks.require_tensor(op, "out", out, FLOATS, tuple(range(1, dims + 1)))
    checks.require_tensor(op, "payloads", payloads, UINT8, (2, 3), like)
    checks.require_scale(op, "out_scale", out_scale, like)
    read = {"payloads": payloads, "out_scale": out_scale}
    checks.memory(op, {"out": out}, read, ("payloads",))


def _require_ranges(op: str, arg: str, payload: Tensor, dims: int) -> int:
    """Return the number of ranges: 1 if the payload has fewer than `dims` dimensions."""
    ranges = payload.shape[-2] if payload.dim() == dims else 1
    if ranges < 1:
        checks.fail(op, arg, "at least 1 range", ranges, verb="have")
    return ranges


def _require_entries(
    op: str, arg: str, payload: Tensor, dims: int, numel: int, capacity: int, dtype: torch.dtype
) -> int:
    """Check a sparse payload and return its number of ranges."""
    ranges = _require_ranges(op, arg, payload, dims)
    checks.require_int(op, "capacity", capacity, 1, 2**32 - 1)
    checks.require_dtype(op, "value_dtype", dtype, tuple(layout.VALUE_DTYPE_CODES))
    nbytes = layout.payload_layout(numel, capacity, dtype, ranges).nbytes
    if payload.shape[-1] != nbytes:
        rule = f"{nbytes} bytes per range for {numel} elements and capacity {capacity}"
        checks.fail(op, arg, rule, payload.shape[-1], verb="have")
    return ranges


def _require_rows(
    op: str, arg: str, payload: Tensor, dims: int, elements: tuple[str, Tensor], format: str
) -> None:
    """Check a dense payload, which may be larger than necessary. `elements`: (name, tensor)."""
    ranges = _require_ranges(op, arg, payload, dims)
    checks.require_choice(op, "format", format, tuple(layout.QUANTIZED_CODES))
    name, tensor = elements
    if tensor.dim() == 2 and tensor.shape[0] != ranges:
        rule = f"{tensor.shape[0]} ranges like {name}"
        checks.fail(op, arg, rule, ranges, verb="have")
    numel, parts = (tensor.shape[1], 1) if tensor.dim() == 2 else (tensor.numel(), ranges)
    nbytes = layout.quantized_payload_bytes(numel, format, parts)
    if payload.shape[-1] < nbytes or payload.shape[-1] % 16:
        rule = f"{nbytes} bytes per range for {numel} elements, or a multiple of 16 above"
        checks.fail(op, arg, rule, payload.shape[-1], verb="have")
