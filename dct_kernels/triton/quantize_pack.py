"""quantize_pack: error feedback and every entry in few bits, in two kernels.

header  of a range, as if all were finite;
pack    a tile of rows: codes, scales and what is left, and the header's flag if need be.
"""

import triton
import triton.language as tl
from torch import Tensor

from .. import layout
from ._launch import launch
from ._numeric import add_gradient
from ._payload import FLAG_NON_FINITE, HEADER_BYTES, damage_flag, locate, range_numel, write_header
from ._quantized import PACK_WARPS, ROW, TILE, elements, header_entries, header_kind, pack

CHUNK = 128  # ranks whose status is read at once


@triton.jit(do_not_specialize=["numel", "num_status", "range_blocks", "nbytes_16"])
def _header_kernel(
    payload, status, numel, num_status, range_blocks, nbytes_16,
    KIND: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    range_index = tl.program_id(0).to(tl.int64)
    length = range_numel(numel, range_blocks, range_index)
    entries = header_entries(length)
    flags = range_index * 0
    if status is not None:
        flags |= damage_flag(status, num_status, CHUNK)
    message = payload + range_index * nbytes_16 * 16
    write_header(message, length, entries, entries, flags, KIND)


@triton.jit
def flag_non_finite(message, sent):
    """In the header, unless all of a tile is sent."""
    flags = (message + 4).to(tl.pointer_type(tl.int32))  # with the version and the format
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
    flag_non_finite(message, pack(acc, old, residual, rows, length, FORMAT, ROW_BYTES, WHOLE))


@triton.jit(do_not_specialize=["numel", "range_blocks", "range_tiles", "nbytes_16"])
def _pack_kernel(
    residual, grad, inv_scale, payload, numel, range_blocks, range_tiles, nbytes_16,
    FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    range_index, begin, length = locate(numel, range_blocks, range_tiles, TILE)
    if length <= 0:
        return
    length = length.to(tl.int32)
    message = payload + range_index * nbytes_16 * 16
    tile = (tl.program_id(0) % range_tiles).to(tl.int64)
    rows = message + HEADER_BYTES + tile * (TILE // ROW * ROW_BYTES)
    if residual is not None:
        residual += begin
    if grad is not None:
        grad += begin
    if length == TILE:  # without masks: in wide accesses
        _pack_tile(residual, grad, inv_scale, message, rows, length, FORMAT, ROW_BYTES, True)
    else:
        _pack_tile(residual, grad, inv_scale, message, rows, length, FORMAT, ROW_BYTES, False)


def write_headers(payload: Tensor, numel: int, format: str, status: Tensor | None = None) -> None:
    ranges = payload.shape[0] if payload.dim() == 2 else 1
    launch(
        _header_kernel, ranges,
        payload, status,
        numel, 0 if status is None else status.numel(),
        layout.range_blocks(numel, ranges), payload.shape[-1] // 16,
        KIND=header_kind(format), CHUNK=CHUNK,
        device=payload.device, num_warps=1,
    )  # fmt: skip


def quantize_pack(
    residual: Tensor | None,
    grad: Tensor | None,
    payload: Tensor,
    format: str,
    inv_scale: Tensor | None = None,
    status: Tensor | None = None,
) -> None:
    given = residual if grad is None else grad
    assert given is not None
    ranges = payload.shape[0] if payload.dim() == 2 else 1
    range_blocks = layout.range_blocks(given.numel(), ranges)
    range_tiles = range_blocks * (layout.BLOCK // TILE)
    write_headers(payload, given.numel(), format, status)
    launch(
        _pack_kernel, ranges * range_tiles,
        residual, grad, inv_scale, payload,
        given.numel(), range_blocks, range_tiles, payload.shape[-1] // 16,
        FORMAT=format, ROW_BYTES=layout.quantized_row_bytes(format), TILE=TILE,
        device=payload.device, num_warps=PACK_WARPS,
    )  # fmt: skip
