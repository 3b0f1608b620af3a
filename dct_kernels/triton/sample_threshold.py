"""sample_threshold: a radix select over the picks of every segment, 8 bits of their 31-bit
magnitudes at a time, the highest first.

Each pass is one launch: the programs of a segment count the current digit of the picks whose higher
digits are those found so far. Every program that needs a digit finds it from the counts of the
passes before, so no program waits for others. Picks are read again in each pass rather than kept:
they are few, and in the cache by then.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import INTERPRETED, launch
from ._numeric import hash32, load_accumulated, magnitude_key

# Picks that a program reads at once. Interpreted programs take long, not picks.
PICKS = 16384 if INTERPRETED else 1024
PROGRAMS, PER_SEGMENT = 2048, 8  # at most, in all; but at least, for a segment of many picks

_PASSES = tl.constexpr(4)
_BINS = tl.constexpr(256)


@triton.jit
def _bounds(segments, s, numel, max_samples):
    """(first element, elements, picks) of segment s, within the tensor whatever the offsets are."""
    begin = tl.minimum(tl.maximum(tl.load(segments + s), 0), numel)
    end = tl.minimum(tl.load(segments + s + 1), numel)
    length = tl.maximum(end - begin, 0)
    return begin, length, tl.minimum(length, max_samples)


@triton.jit
def _rank(density_bits, picks):
    """The rank of the wanted key, from the largest: clamp(ceil(density * picks), 1, picks)."""
    # As bits, because a float argument of a kernel would be rounded to float32.
    density = density_bits.to(tl.int64).to(tl.float64, bitcast=True)
    wanted = tl.ceil(density * picks.to(tl.float64))
    wanted = tl.minimum(tl.maximum(wanted, 1.0), picks.to(tl.float64))
    return wanted.to(tl.int32)


@triton.jit
def _find_digits(histograms, rank, PASSES: tl.constexpr):
    """The first digits of the rank-th largest key, and its rank among the keys that share them."""
    prefix = rank * 0
    lane = tl.arange(0, _BINS)
    for p in tl.static_range(PASSES):
        bins = tl.load(histograms + p * _BINS + (_BINS - 1 - lane))  # the largest digit first
        above = tl.cumsum(bins) < rank
        prefix = prefix << 8 | (_BINS - 1 - tl.sum(above.to(tl.int32)))
        rank -= tl.sum(tl.where(above, bins, 0))
    return prefix, rank


@triton.jit
def _stratum_start(j, length, picks):
    return j * (length // picks) + j * (length % picks) // picks


@triton.jit
def _pick(j, length, picks, seed, s):
    """The element of the segment that stratum j contributes."""
    start = _stratum_start(j, length, picks)
    stratum = _stratum_start(j + 1, length, picks) - start
    hashed = hash32(seed.to(tl.uint32), s.to(tl.uint32), j.to(tl.uint32)).to(tl.int64)
    # (hashed * stratum) >> 32; the halves of hashed apart keep both products within 64 bits.
    return start + (((hashed >> 16) * stratum + (((hashed & 0xFFFF) * stratum) >> 16)) >> 16)


@triton.jit(do_not_specialize=["numel", "max_samples", "seed", "density_bits", "per_segment"])
def _count_kernel(
    x, residual, inv_scale, segments, histograms,
    numel, max_samples, seed, density_bits, per_segment,
    PASS: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) // per_segment
    begin, length, picks = _bounds(segments, s, numel, max_samples)
    first = (tl.program_id(0) % per_segment).to(tl.int64) * PICKS
    if first >= picks:
        return
    histograms += s.to(tl.int64) * (_PASSES * _BINS)
    prefix, _ = _find_digits(histograms, _rank(density_bits, picks), PASS)
    SHIFT: tl.constexpr = 24 - 8 * PASS
    counts = tl.zeros([_BINS], tl.int32)
    while first < picks:
        j = first + tl.arange(0, PICKS)
        counted = j < picks
        i = begin + j
        if length > picks:
            i = begin + _pick(j, length, picks, seed, s)
        key = magnitude_key(load_accumulated(residual, x, inv_scale, i, counted))
        if PASS > 0:
            counted = counted & ((key >> (SHIFT + 8)) == prefix)
        counts += tl.histogram((key >> SHIFT) & (_BINS - 1), _BINS, mask=counted)
        first += per_segment.to(tl.int64) * PICKS
    lane = tl.arange(0, _BINS)
    tl.atomic_add(histograms + PASS * _BINS + lane, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["numel", "max_samples", "density_bits"])
def _threshold_kernel(segments, histograms, threshold, numel, max_samples, density_bits):
    s = tl.program_id(0)
    _, _, picks = _bounds(segments, s, numel, max_samples)
    histograms += s.to(tl.int64) * (_PASSES * _BINS)
    key, _ = _find_digits(histograms, _rank(density_bits, picks), _PASSES)
    key = tl.where(picks > 0, key, 0x7F800000)  # of an empty segment: infinity
    tl.store(threshold + s, key.to(tl.int32).to(tl.float32, bitcast=True))


def sample_threshold(
    x: Tensor,
    residual: Tensor | None,
    segments: Tensor,
    density: float,
    max_samples: int = 65536,
    seed: int = 0,
    inv_scale: Tensor | None = None,
) -> Tensor:
    numel, num_segments, device = x.numel(), segments.numel() - 1, x.device
    threshold = torch.empty(num_segments, dtype=torch.float32, device=device)
    histograms = torch.zeros(
        num_segments * _PASSES.value * _BINS.value, dtype=torch.int32, device=device
    )
    density_bits = struct.unpack("<q", struct.pack("<d", density))[0]
    per_segment = min(
        triton.cdiv(min(max_samples, max(numel, 1)), PICKS),
        max(PROGRAMS // max(num_segments, 1), PER_SEGMENT),
    )
    for step in range(_PASSES.value):
        launch(
            _count_kernel, num_segments * per_segment,
            x, residual, inv_scale, segments, histograms,
            numel, max_samples, seed & 0xFFFFFFFF, density_bits, per_segment,
            PASS=step, PICKS=PICKS, device=device,
        )  # fmt: skip
    launch(
        _threshold_kernel, num_segments,
        segments, histograms, threshold, numel, max_samples, density_bits, device=device,
    )  # fmt: skip
    return threshold
