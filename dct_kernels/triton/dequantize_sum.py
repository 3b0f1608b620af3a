"""dequantize_sum: the sum of the dense payloads of all ranks, in two kernels.

check  per rank: validates the headers, and writes the status and a verdict for each range.
sum    per tile of the output: sums the valid payloads in rank order.
"""

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import layout
from ._launch import launch
from ._numeric import round_to
from ._payload import FLAG_NON_FINITE, HEADER_BYTES, locate, range_numel
from ._quantized import (
    ROW,
    SUM_WARPS,
    TILE,
    elements,
    header_entries,
    header_kind,
    range_sizes,
    sum_payloads,
)

CHUNK = 16  # headers that are read together


@triton.jit(do_not_specialize=["numel", "ranges", "range_units", "nbytes_16"])
def _check_kernel(
    payloads, verdicts, status, numel, ranges, range_units, nbytes_16,
    KIND: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    rank = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 8)[None, :]
    found = tl.zeros([CHUNK], tl.int32)
    begin = ranges * 0
    while begin < ranges:
        range_index = begin + tl.arange(0, CHUNK)
        inside = range_index < ranges
        message = payloads + (rank * ranges + range_index) * nbytes_16 * 16
        words = message.to(tl.pointer_type(tl.int64))[:, None] + lane
        header = tl.load(words, mask=inside[:, None], other=0)
        length = range_numel(numel, range_units, range_index.to(tl.int64), UNIT)[:, None]
        entries = header_entries(length)
        expected = tl.where(lane == 1, length, tl.where(lane == 0, KIND, 0))
        expected = tl.where(lane == 2, entries << 32 | entries, expected)
        may_be_set: tl.constexpr = FLAG_NON_FINITE << 56
        known = tl.where(lane == 0, ~may_be_set, -1)
        wrong = tl.max(((header & known) != expected).to(tl.int32), 1)
        tl.store(verdicts + rank * ranges + range_index, wrong, mask=inside)
        found |= tl.where(inside, wrong, 0)
        begin += CHUNK
    tl.store(status + rank, tl.max(found))


@triton.jit
def _store(out, factor, total, length, WHOLE: tl.constexpr):
    i = elements()
    result = round_to(factor * total, out.dtype.element_ty)
    tl.store(out + i, result, mask=None if WHOLE else i < length)


@triton.jit(do_not_specialize=[
    "numel", "ranks", "ranges", "range_units", "range_tiles", "nbytes_16", "scale_bits",
])  # fmt: skip
def _sum_kernel(
    payloads, verdicts, out, out_scale,
    numel, ranks, ranges, range_units, range_tiles, nbytes_16, scale_bits,
    FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    range_index, begin, length = locate(numel, range_units, range_tiles, TILE, UNIT)
    if length <= 0:
        return
    length = length.to(tl.int32)
    tile = (tl.program_id(0) % range_tiles).to(tl.int64)
    rows = payloads + (range_index * nbytes_16 * 16 + HEADER_BYTES)
    rows += tile * (TILE // ROW * ROW_BYTES)
    rank_bytes = ranges.to(tl.int64) * nbytes_16 * 16
    total = sum_payloads(
        rows, verdicts + range_index, ranks, rank_bytes, ranges, length, FORMAT, ROW_BYTES
    )
    factor = scale_bits.to(tl.int32).to(tl.float32, bitcast=True)
    if out_scale is not None:
        factor *= tl.load(out_scale)
    out += begin
    if length == TILE:  # unmasked, so that accesses are wide
        _store(out, factor, total, length, True)
    else:
        _store(out, factor, total, length, False)


def _float_bits(x: float) -> int:
    """The bits of float32(x). Kernels take bits, because Triton 3.6 interprets -0.0 as 0.0."""
    return ctypes.c_int32.from_buffer(ctypes.c_float(x)).value


def dequantize_sum(
    payloads: Tensor,
    out: Tensor,
    format: str,
    scale: float = 1.0,
    out_scale: Tensor | None = None,
) -> Tensor:
    numel, ranks, nbytes = out.numel(), payloads.shape[0], payloads.shape[-1]
    ranges = payloads.shape[1] if payloads.dim() == 3 else 1
    unit, range_units, range_tiles = range_sizes(out, ranges)
    verdicts = torch.empty(ranks, ranges, dtype=torch.int32, device=payloads.device)
    status = torch.empty(ranks, dtype=torch.int32, device=payloads.device)
    launch(
        _check_kernel, ranks,
        payloads, verdicts, status, numel, ranges, range_units, nbytes // 16,
        KIND=header_kind(format), CHUNK=CHUNK, UNIT=unit,
        device=payloads.device, num_warps=1,
    )  # fmt: skip
    launch(
        _sum_kernel, ranges * range_tiles,
        payloads, verdicts, out, out_scale,
        numel, ranks, ranges, range_units, range_tiles, nbytes // 16, _float_bits(scale),
        FORMAT=format, ROW_BYTES=layout.quantized_row_bytes(format), TILE=TILE, UNIT=unit,
        device=out.device, num_warps=SUM_WARPS,
    )  # fmt: skip
    return verdicts if out.dim() == 2 else status
