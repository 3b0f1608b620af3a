"""quantize_pack: error feedback and quantization of all entries, in two kernels.

header  per range: writes the header without the non-finite flag.
pack    per tile of rows: writes codes, scales and the residual, and sets the flag if needed.
"""

import triton
import triton.language as tl
from torch import Tensor

from .. import layout
from ._launch import launch
from ._numeric import add_gradient
from ._payload import FLAG_NON_FINITE, HEADER_BYTES, locate, range_numel, write_header
from ._quantized import (
    PACK_WARPS,
    ROW,
    TILE,
    elements,
    header_entries,
    header_kind,
    pack,
    range_sizes,
)


@triton.jit(do_not_specialize=["numel", "range_units", "nbytes_16"])
def _header_kernel(
    payload, numel, range_units, nbytes_16, KIND: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    range_index = tl.program_id(0).to(tl.int64)
    length = range_numel(numel, range_units, range_index, UNIT)
    entries = header_entries(length)
    message = payload + range_index * nbytes_16 * 16
    write_header(message, length, entries, entries, 0, KIND)


@triton.jit
def _flag_non_finite(message, sent):
    """Set the flag in the header, unless all entries of a tile are sent."""
    flags = (message + 4).to(tl.pointer_type(tl.int32))  # version, format and flags
    found = tl.max((~sent).to(tl.int32)) != 0
    tl.atomic_or(flags, FLAG_NON_FINITE << 24, mask=found, sem="relaxed")


@triton.jit
def _pack_tile(
    residual, grad, inv_scale, message, rows, length,
    FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    i = elements()
    mask = None if WHOLE else i < length
    old = None if residual is None else tl.load(residual + i, mask=mask)
    acc = add_gradient(old, grad, inv_scale, i, mask)
    _flag_non_finite(message, pack(acc, old, residual, rows, length, FORMAT, ROW_BYTES, WHOLE))


@triton.jit(do_not_specialize=["numel", "range_units", "range_tiles", "nbytes_16"])
def _pack_kernel(
    residual, grad, inv_scale, payload, numel, range_units, range_tiles, nbytes_16,
    FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    range_index, begin, length = locate(numel, range_units, range_tiles, TILE, UNIT)
    if length <= 0:
        return
    length = length.to(tl.int32)
    message = payload + range_index * nbytes_16 * 16
    tile = (tl.program_id(0) % range_tiles).to(tl.int64)
    rows = message + HEADER_BYTES + tile * (TILE // ROW * ROW_BYTES)
    if residual is not None:
        residual += begin
    grad += begin
    if length == TILE:  # unmasked, so that accesses are wide
        _pack_tile(residual, grad, inv_scale, message, rows, length, FORMAT, ROW_BYTES, True)
    else:
        _pack_tile(residual, grad, inv_scale, message, rows, length, FORMAT, ROW_BYTES, False)


def quantize_pack(
    residual: Tensor | None,
    grad: Tensor,
    payload: Tensor,
    format: str,
    inv_scale: Tensor | None = None,
) -> None:
    numel = grad.numel()
    ranges = payload.shape[0] if payload.dim() == 2 else 1
    unit, range_units, range_tiles = range_sizes(grad, ranges)
    launch(
        _header_kernel, ranges,
        payload, numel, range_units, payload.shape[-1] // 16,
        KIND=header_kind(format), UNIT=unit,
        device=payload.device, num_warps=1,
    )  # fmt: skip
    launch(
        _pack_kernel, ranges * range_tiles,
        residual, grad, inv_scale, payload,
        numel, range_units, range_tiles, payload.shape[-1] // 16,
        FORMAT=format, ROW_BYTES=layout.quantized_row_bytes(format), TILE=TILE, UNIT=unit,
        device=payload.device, num_warps=PACK_WARPS,
    )  # fmt: skip
