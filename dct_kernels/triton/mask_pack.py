"""mask_pack: error feedback, threshold and ordered compaction, in three kernels.

mark   per tile: the new residual as if nothing were packed, a bit per kept entry, and their count;
scan   those counts, into the offsets of each tile's entries; header, starts and `seen`;
pack   per tile: the kept entries, found by their bits, into the payload and out of the residual.

No kernel waits for a different program. Above a single pass that costs two bits per element and the
residuals of kept entries, which pack reads and writes once more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import layout
from ._launch import INTERPRETED, TL_DTYPES, launch
from ._numeric import is_finite, load_accumulated, round_saturating, to_float
from ._payload import (
    BLOCK,
    FLAG_NON_FINITE,
    FLAG_OVERFLOW,
    HEADER_BYTES,
    damage_flag,
    locate,
    range_numel,
    write_header,
)

# Elements; a block of the payload begins with a tile. Interpreted programs take long, not tiles.
TILE = layout.BLOCK if INTERPRETED else 4096
CHUNK = 4096  # tiles that the scan reads at once

_PROBES = tl.constexpr(128)  # of a search


@triton.jit
def _ends_up_to(ends, num_segments, x):
    """How many of the ascending `ends` are at most x."""
    low = num_segments * 0
    high = num_segments
    while low < high:
        step = (high - low + _PROBES - 1) // _PROBES
        probe = low + (tl.arange(0, _PROBES) + 1) * step - 1
        inside = probe < high
        passed = inside & (tl.load(ends + probe, mask=inside, other=0) <= x)
        low += tl.sum(passed.to(tl.int32)) * step
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def _segments_of(ends, begin, offset, size):
    """The segment, from 0 to size, of each element begin + offset."""
    low = tl.zeros_like(offset)
    while size > 0:
        half = (size + 1) // 2
        passed = tl.load(ends + (low + half - 1)) - begin <= offset
        low = tl.where(passed, low + half, low)
        size -= half
    return low


@triton.jit
def _passes(acc, tau):
    """Zeros never pass; a NaN, and every other entry at a NaN threshold, always."""
    return ~(tl.abs(acc) < tau) & (acc != 0.0)


@triton.jit(do_not_specialize=["numel", "num_segments", "range_blocks", "range_tiles"])
def _mark_kernel(
    residual, grad, inv_scale, segments, threshold, bits, words, counts,
    numel, num_segments, range_blocks, range_tiles, TILE: tl.constexpr,
):  # fmt: skip
    _, begin, length = locate(numel, range_blocks, range_tiles, TILE)
    if length <= 0:
        return
    offset = tl.arange(0, TILE)
    i = begin + offset
    # Whatever the segments hold, no index is out of bounds; if there are none, none is read.
    ends = segments + 1
    highest = tl.maximum(num_segments - 1, 0)
    length = tl.where(num_segments > 0, length, 0)
    first = tl.minimum(_ends_up_to(ends, num_segments, begin), highest)
    tau = tl.load(threshold + first, mask=num_segments > 0, other=-1.0)
    first_end = tl.load(ends + first, mask=num_segments > 0, other=0)
    whole = (length == TILE) & (first_end >= begin + TILE) & ~(tau < 0)
    if whole:
        owned = tl.full([TILE], True, tl.int1)
        acc = load_accumulated(residual, grad, inv_scale, i, None)
        kept = _passes(acc, tau)
    else:
        last = tl.minimum(_ends_up_to(ends, num_segments, begin + length - 1), highest)
        segment = _segments_of(ends + first, begin, offset, (last - first).to(tl.int32))
        taus = tl.load(threshold + first + segment, mask=offset < length, other=-1.0)
        owned = ~(taus < 0)
        acc = tl.where(owned, load_accumulated(residual, grad, inv_scale, i, owned), 0.0)
        kept = _passes(acc, taus)
        tl.atomic_add(counts + first + segment, 1, mask=kept, sem="relaxed")

    finite = is_finite(acc)
    counted = tl.sum(kept.to(tl.int32) + ((~finite).to(tl.int32) << 16))
    count = (counted & 0xFFFF).to(tl.int64)
    non_finite = counted >> 16 != 0
    tl.store(words + tl.program_id(0), count << 1 | non_finite.to(tl.int64))
    if whole:
        tl.atomic_add(counts + first, count, sem="relaxed")
    kept_bits = tl.reshape(kept.to(tl.int32), [TILE // 32, 32]) << tl.arange(0, 32)[None, :]
    word = tl.program_id(0).to(tl.int64) * (TILE // 32) + tl.arange(0, TILE // 32)
    tl.store(bits + word, tl.sum(kept_bits, 1))

    if grad is not None:
        if whole & ~non_finite:
            tl.store(residual + i, acc)
        else:
            # In a tile with a non-finite entry, pack computes kept entries anew.
            tl.store(residual + i, acc, mask=tl.where(non_finite, owned & ~kept, owned))


@triton.jit(do_not_specialize=[
    "numel", "num_segments", "num_status", "capacity", "range_blocks", "range_tiles", "nbytes",
])  # fmt: skip
def _scan_kernel(
    words, counts, seen, status, payload,
    numel, num_segments, num_status, capacity, range_blocks, range_tiles, nbytes,
    KIND: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per range. In each word, the number of entries before replaces the count."""
    program = tl.program_id(0).to(tl.int64)
    message = payload + program * nbytes
    starts = (message + HEADER_BYTES).to(tl.pointer_type(tl.uint32))
    length = range_numel(numel, range_blocks, program)
    tiles = (length + TILE - 1) // TILE
    total = tiles * 0
    non_finite = tiles * 0
    chunk = tiles * 0
    while chunk < tiles:
        tile = chunk + tl.arange(0, CHUNK)
        inside = tile < tiles
        word = tl.load(words + program * range_tiles + tile, mask=inside, other=0)
        count = (word >> 1).to(tl.int32)
        before = total + (tl.cumsum(count) - count)
        tl.store(words + program * range_tiles + tile, before << 1 | (word & 1), mask=inside)
        start = tl.minimum(before, capacity).to(tl.uint32)
        tl.store(starts + tile * TILE // BLOCK, start, mask=inside & (tile * TILE % BLOCK == 0))
        total += tl.sum(count)
        non_finite |= tl.max(word & 1)
        chunk += CHUNK
    packed = tl.minimum(total, capacity)
    flags = tl.where(total > capacity, FLAG_OVERFLOW, 0)
    flags |= tl.where(non_finite != 0, FLAG_NON_FINITE, 0)
    if status is not None:
        flags |= damage_flag(status, num_status, CHUNK)
    write_header(message, length, capacity, packed, flags, KIND)
    tl.store(starts + (length + BLOCK - 1) // BLOCK, packed.to(tl.uint32))

    chunk = program * CHUNK
    while chunk < num_segments:
        segment = chunk + tl.arange(0, CHUNK)
        inside = segment < num_segments
        passed = tl.minimum(tl.load(counts + segment, mask=inside, other=0), 0x7FFFFFFF)
        tl.store(seen + segment, passed.to(tl.int32), mask=inside)
        chunk += tl.num_programs(0) * CHUNK


@triton.jit
def _popcount(bits):
    """The number of bits set, of uint32."""
    bits -= bits >> 1 & 0x55555555
    bits = (bits & 0x33333333) + (bits >> 2 & 0x33333333)
    bits = bits + (bits >> 4) & 0x0F0F0F0F
    return (bits * 0x01010101 >> 24).to(tl.int32)


@triton.jit(do_not_specialize=[
    "numel", "capacity", "range_blocks", "range_tiles", "nbytes", "positions_at", "values_at",
])  # fmt: skip
def _pack_kernel(
    residual, grad, inv_scale, payload, bits, words,
    numel, capacity, range_blocks, range_tiles, nbytes, positions_at, values_at,
    VALUE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    range_index, begin, length = locate(numel, range_blocks, range_tiles, TILE)
    if length <= 0:
        return
    word = tl.load(words + tl.program_id(0))
    non_finite = (word & 1) != 0
    written = tl.minimum(word >> 1, capacity)
    room = tl.minimum(capacity - written, TILE).to(tl.int32)
    message = payload + range_index * nbytes
    positions = (message + positions_at).to(tl.pointer_type(tl.uint16)) + written
    values = (message + values_at).to(tl.pointer_type(VALUE)) + written

    lane = tl.arange(0, TILE // 32)
    left = tl.load(bits + tl.program_id(0).to(tl.int64) * (TILE // 32) + lane)
    left = left.to(tl.uint32, bitcast=True)
    count = _popcount(left)
    entry = tl.cumsum(count) - count
    rounds = tl.max(count)
    while rounds > 0:  # in each, the lowest bit left of every 32
        kept = left != 0
        offset = lane * 32 + _popcount((left & (0 - left)) - 1)
        i = begin + offset
        old = tl.load(residual + i, mask=kept, other=0.0)
        acc = old
        if (grad is not None) & non_finite:  # mark left those as they were
            acc = load_accumulated(residual, grad, inv_scale, i, kept)
        packed = kept & (entry < room)
        value = round_saturating(acc, VALUE)
        tl.store(positions + entry, (begin % BLOCK + offset).to(tl.uint16), mask=packed)
        tl.store(values + entry, value, mask=packed)
        new = tl.where(packed, acc - to_float(value), acc)
        # A residual whose acc is not finite keeps its value.
        new = tl.where(is_finite(acc), new, tl.where(is_finite(old), old, 0.0))
        tl.store(residual + i, new, mask=kept)
        left &= left - 1
        entry += 1
        rounds -= 1


def mask_pack(
    residual: Tensor,
    grad: Tensor | None,
    segments: Tensor,
    threshold: Tensor,
    payload: Tensor,
    seen: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    inv_scale: Tensor | None = None,
    status: Tensor | None = None,
) -> None:
    numel, num_segments, device = residual.numel(), seen.numel(), residual.device
    num_status = 0 if status is None else status.numel()
    ranges = payload.shape[0] if payload.dim() == 2 else 1
    range_blocks = layout.range_blocks(numel, ranges)
    range_tiles = range_blocks * (layout.BLOCK // TILE)
    tiles = ranges * range_tiles
    sections = layout.payload_layout(numel, capacity, value_dtype, ranges)

    bits = torch.empty(tiles * (TILE // 32), dtype=torch.int32, device=device)
    words = torch.empty(tiles, dtype=torch.int64, device=device)  # count << 1 | not all are finite
    counts = torch.zeros(num_segments, dtype=torch.int64, device=device)
    launch(
        _mark_kernel, tiles,
        residual, grad, inv_scale, segments, threshold, bits, words, counts,
        numel, num_segments, range_blocks, range_tiles, TILE=TILE,
        device=device, num_warps=16,
    )  # fmt: skip
    launch(
        _scan_kernel, ranges,
        words, counts, seen, status, payload,
        numel, num_segments, num_status, capacity, range_blocks, range_tiles, sections.nbytes,
        KIND=layout.header_kind(value_dtype), TILE=TILE, CHUNK=CHUNK,
        device=device, num_warps=16,
    )  # fmt: skip
    launch(
        _pack_kernel, tiles,
        residual, grad, inv_scale, payload, bits, words,
        numel, capacity, range_blocks, range_tiles,
        sections.nbytes, sections.positions, sections.values,
        VALUE=TL_DTYPES[value_dtype], TILE=TILE,
        device=device, num_warps=4,
    )  # fmt: skip
