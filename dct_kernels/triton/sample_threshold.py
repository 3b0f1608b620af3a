"""sample_threshold: a radix select over the sampled elements (picks) of every range.

Each pass finds one digit of 8 bits of the threshold, the most significant digit first. A pass is
one launch. The programs of a range count the current digit of the picks that have the digits found
so far. Every program derives these digits from the counts of the earlier passes, so no program
waits for others. Each pass reads the picks again, because they are few and in the cache.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import layout
from ._launch import INTERPRETED, launch
from ._numeric import FLOAT32_INFINITY, hash32, load_accumulated, magnitude_key
from ._payload import BLOCK, range_numel

# Picks that a program reads together. The interpreter's time depends on the number of programs.
PICKS = 16384 if INTERPRETED else 1024
# A launch has at most PROGRAMS programs, or PER_RANGE per range if that is more.
PROGRAMS, PER_RANGE = 2048, 8

_PASSES = tl.constexpr(4)
_BINS = tl.constexpr(256)


@triton.jit
def _rank(density_bits, picks):
    """The rank of the wanted key, from the largest: clamp(ceil(density * picks), 1, picks)."""
    # Passed as bits, because a float argument of a kernel would be rounded to float32.
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
def _pick(j, length, picks, seed, r):
    """The index, within range r, of the element that is sampled from stratum j."""
    start = _stratum_start(j, length, picks)
    stratum = _stratum_start(j + 1, length, picks) - start
    hashed = hash32(seed.to(tl.uint32), r.to(tl.uint32), j.to(tl.uint32)).to(tl.int64)
    # (hashed * stratum) >> 32. The two halves of hashed keep both products within 64 bits.
    return start + (((hashed >> 16) * stratum + (((hashed & 0xFFFF) * stratum) >> 16)) >> 16)


@triton.jit(do_not_specialize=[
    "numel", "range_blocks", "max_samples", "seed", "density_bits", "per_range",
])  # fmt: skip
def _count_kernel(
    grad, residual, inv_scale, histograms,
    numel, range_blocks, max_samples, seed, density_bits, per_range,
    PASS: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) // per_range).to(tl.int64)
    length = range_numel(numel, range_blocks, r)
    picks = tl.minimum(length, max_samples)
    first = (tl.program_id(0) % per_range).to(tl.int64) * PICKS
    if first >= picks:
        return
    begin = r * range_blocks * BLOCK
    histograms += r * (_PASSES * _BINS)
    prefix, _ = _find_digits(histograms, _rank(density_bits, picks), PASS)
    SHIFT: tl.constexpr = 24 - 8 * PASS
    counts = tl.zeros([_BINS], tl.int32)
    while first < picks:
        j = first + tl.arange(0, PICKS)
        counted = j < picks
        i = begin + j
        if length > picks:
            i = begin + _pick(j, length, picks, seed, r)
        key = magnitude_key(load_accumulated(residual, grad, inv_scale, i, counted))
        if PASS > 0:
            counted = counted & ((key >> (SHIFT + 8)) == prefix)
        counts += tl.histogram((key >> SHIFT) & (_BINS - 1), _BINS, mask=counted)
        first += per_range.to(tl.int64) * PICKS
    lane = tl.arange(0, _BINS)
    tl.atomic_add(histograms + PASS * _BINS + lane, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["numel", "range_blocks", "max_samples", "density_bits"])
def _threshold_kernel(histograms, threshold, numel, range_blocks, max_samples, density_bits):
    r = tl.program_id(0).to(tl.int64)
    picks = tl.minimum(range_numel(numel, range_blocks, r), max_samples)
    histograms += r * (_PASSES * _BINS)
    key, _ = _find_digits(histograms, _rank(density_bits, picks), _PASSES)
    key = tl.where(picks > 0, key, FLOAT32_INFINITY)  # the threshold of an empty range
    tl.store(threshold + r, key.to(tl.int32).to(tl.float32, bitcast=True))


def sample_threshold(
    grad: Tensor,
    residual: Tensor,
    density: float,
    ranges: int = 1,
    max_samples: int = 65536,
    seed: int = 0,
    inv_scale: Tensor | None = None,
) -> Tensor:
    numel, device = grad.numel(), grad.device
    range_blocks = layout.range_blocks(numel, ranges)
    longest = min(numel, range_blocks * layout.BLOCK)
    per_range = min(
        triton.cdiv(min(max_samples, longest), PICKS), max(PROGRAMS // ranges, PER_RANGE)
    )
    density_bits = struct.unpack("<q", struct.pack("<d", density))[0]
    histograms = torch.zeros(ranges * _PASSES.value * _BINS.value, dtype=torch.int32, device=device)
    threshold = torch.empty(ranges, dtype=torch.float32, device=device)
    for step in range(_PASSES.value):
        launch(
            _count_kernel, ranges * per_range,
            grad, residual, inv_scale, histograms,
            numel, range_blocks, max_samples, seed & 0xFFFFFFFF, density_bits, per_range,
            PASS=step, PICKS=PICKS, device=device,
        )  # fmt: skip
    launch(
        _threshold_kernel, ranges,
        histograms, threshold, numel, range_blocks, max_samples, density_bits, device=device,
    )  # fmt: skip
    return threshold
