"""mask_pack: error feedback, threshold and ordered compaction, in three kernels.

mark   per tile: sets the residual to acc, and writes a bit per element (1: it passes) and a count.
scan   per range: turns the counts into the offsets of tiles, and writes header, starts and `seen`.
pack   per tile: finds passing entries by their bits, packs them and corrects their residuals.

In a tile with a non-finite entry, the mark kernel does not change residuals of passing entries.
No program waits for another. Compared with a single pass, this moves two more bits per element, and
the pack kernel reads and writes the residuals of passing entries again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import layout
from ._launch import INTERPRETED, TL_DTYPES, launch
from ._numeric import add_gradient, is_finite, load_accumulated, round_saturating, to_float
from ._payload import (
    BLOCK,
    FLAG_NON_FINITE,
    FLAG_OVERFLOW,
    HEADER_BYTES,
    locate,
    range_numel,
    write_header,
)

# Elements of a tile. A block consists of whole tiles, so every tile is in one range. The
# interpreter's time depends on the number of programs, not on their size.
TILE = layout.BLOCK if INTERPRETED else 4096
CHUNK = 4096  # tiles that the scan reads together


@triton.jit(do_not_specialize=["numel", "range_blocks", "range_tiles"])
def _mark_kernel(
    residual, grad, inv_scale, threshold, bits, words,
    numel, range_blocks, range_tiles, TILE: tl.constexpr,
):  # fmt: skip
    range_index, begin, length = locate(numel, range_blocks, range_tiles, TILE)
    if length <= 0:
        return
    offset = tl.arange(0, TILE)
    inside = offset < length
    i = begin + offset
    whole = length == TILE
    if whole:  # unmasked, so that accesses are wide
        acc = load_accumulated(residual, grad, inv_scale, i, None)
    else:
        acc = tl.where(inside, load_accumulated(residual, grad, inv_scale, i, inside), 0.0)
    # Zeros never pass. NaN always passes. If the threshold is NaN, all nonzero entries pass.
    kept = ~(tl.abs(acc) < tl.load(threshold + range_index)) & (acc != 0.0)

    finite = is_finite(acc)
    counted = tl.sum(kept.to(tl.int32) + ((~finite).to(tl.int32) << 16))
    count = (counted & 0xFFFF).to(tl.int64)
    non_finite = counted >> 16 != 0
    tl.store(words + tl.program_id(0), count << 1 | non_finite.to(tl.int64))
    kept_bits = tl.reshape(kept.to(tl.int32), [TILE // 32, 32]) << tl.arange(0, 32)[None, :]
    word = tl.program_id(0).to(tl.int64) * (TILE // 32) + tl.arange(0, TILE // 32)
    tl.store(bits + word, tl.sum(kept_bits, 1))

    if whole & ~non_finite:
        tl.store(residual + i, acc)
    else:
        # If the tile has a non-finite entry, the pack kernel computes acc for passing entries.
        tl.store(residual + i, acc, mask=tl.where(non_finite, inside & ~kept, inside))


@triton.jit(do_not_specialize=["numel", "capacity", "range_blocks", "range_tiles", "nbytes"])
def _scan_kernel(
    words, seen, payload, numel, capacity, range_blocks, range_tiles, nbytes,
    KIND: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Replace the count in each word with the number of passing entries in earlier tiles."""
    range_index = tl.program_id(0).to(tl.int64)
    words += range_index * range_tiles
    message = payload + range_index * nbytes
    starts = (message + HEADER_BYTES).to(tl.pointer_type(tl.uint32))
    length = range_numel(numel, range_blocks, range_index)
    tiles = (length + TILE - 1) // TILE
    total = tiles * 0
    non_finite = tiles * 0
    chunk = tiles * 0
    while chunk < tiles:
        tile = chunk + tl.arange(0, CHUNK)
        inside = tile < tiles
        word = tl.load(words + tile, mask=inside, other=0)
        count = (word >> 1).to(tl.int32)
        before = total + (tl.cumsum(count) - count)
        tl.store(words + tile, before << 1 | (word & 1), mask=inside)
        start = tl.minimum(before, capacity).to(tl.uint32)
        tl.store(starts + tile * TILE // BLOCK, start, mask=inside & (tile * TILE % BLOCK == 0))
        total += tl.sum(count)
        non_finite |= tl.max(word & 1)
        chunk += CHUNK
    packed = tl.minimum(total, capacity)
    flags = tl.where(total > capacity, FLAG_OVERFLOW, 0)
    flags |= tl.where(non_finite != 0, FLAG_NON_FINITE, 0)
    write_header(message, length, capacity, packed, flags.to(tl.int64), KIND)
    tl.store(starts + (length + BLOCK - 1) // BLOCK, packed.to(tl.uint32))
    tl.store(seen + range_index, tl.minimum(total, 0x7FFFFFFF).to(tl.int32))


@triton.jit
def _popcount(bits):
    """The number of set bits of a uint32."""
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
    remaining = tl.minimum(capacity - written, TILE).to(tl.int32)
    message = payload + range_index * nbytes
    positions = (message + positions_at).to(tl.pointer_type(tl.uint16)) + written
    values = (message + values_at).to(tl.pointer_type(VALUE)) + written

    lane = tl.arange(0, TILE // 32)
    left = tl.load(bits + tl.program_id(0).to(tl.int64) * (TILE // 32) + lane)
    left = left.to(tl.uint32, bitcast=True)
    count = _popcount(left)
    entry = tl.cumsum(count) - count
    rounds = tl.max(count)
    while rounds > 0:  # each round takes the lowest remaining bit of every word
        kept = left != 0
        offset = lane * 32 + _popcount((left & (0 - left)) - 1)
        i = begin + offset
        old = tl.load(residual + i, mask=kept, other=0.0)
        acc = old
        if non_finite:  # the mark kernel did not change these residuals
            acc = add_gradient(old, grad, inv_scale, i, kept)
        packed = kept & (entry < remaining)
        value = round_saturating(acc, VALUE)
        tl.store(positions + entry, (begin % BLOCK + offset).to(tl.uint16), mask=packed)
        tl.store(values + entry, value, mask=packed)
        new = tl.where(packed, acc - to_float(value), acc)
        # If acc is not finite, keep the old residual, or write 0 if that is not finite.
        new = tl.where(is_finite(acc), new, tl.where(is_finite(old), old, 0.0))
        tl.store(residual + i, new, mask=kept)
        left &= left - 1
        entry += 1
        rounds -= 1


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
    numel, device = residual.numel(), residual.device
    ranges = payload.shape[0] if payload.dim() == 2 else 1
    range_blocks = layout.range_blocks(numel, ranges)
    range_tiles = range_blocks * (layout.BLOCK // TILE)
    tiles = ranges * range_tiles
    sections = layout.payload_layout(numel, capacity, value_dtype, ranges)

    bits = torch.empty(tiles * (TILE // 32), dtype=torch.int32, device=device)
    words = torch.empty(tiles, dtype=torch.int64, device=device)  # count << 1 | has non-finite
    launch(
        _mark_kernel, tiles,
        residual, grad, inv_scale, threshold, bits, words,
        numel, range_blocks, range_tiles, TILE=TILE,
        device=device, num_warps=16,
    )  # fmt: skip
    launch(
        _scan_kernel, ranges,
        words, seen, payload, numel, capacity, range_blocks, range_tiles, sections.nbytes,
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
