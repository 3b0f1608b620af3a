"""scatter_unpack: sums the payloads of all ranks into a dense tensor, in two kernels.

check  per rank and block of the output: validates the entries, writes the status and a verdict.
add    per block of the output: clears it, adds the valid entries rank by rank, writes the result.

A program owns the 16,384 elements of a block. Its threads synchronize after adding the entries of
each rank, so the ranks are added in order, without atomics. Sums are kept in memory, in `out`
itself if it is float32. The few blocks in progress stay in the L2 cache.
"""

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import layout
from ._launch import INTERPRETED, TL_DTYPES, launch
from ._numeric import round_to, to_float
from ._payload import BLOCK, FLAG_NON_FINITE, FLAG_OVERFLOW, HEADER_BYTES, range_numel

# Entries and elements that a program reads together. Higher numbers make the interpreter faster.
ENTRIES = layout.BLOCK if INTERPRETED else 1024
ELEMENTS = layout.BLOCK if INTERPRETED else 4096

_HEADER = tl.constexpr(1)  # status bits
_STARTS = tl.constexpr(2)
_POSITIONS = tl.constexpr(4)
_POISON = tl.constexpr(1 << 16)  # a flag in a block's verdict

_LOST_NON_FINITE = tl.constexpr(FLAG_OVERFLOW.value | FLAG_NON_FINITE.value)


@triton.jit
def _entries_bounds(message, block, block_length):
    """The first entry of a block, and the end of its entries. An empty range has no starts[1]."""
    starts = (message + HEADER_BYTES).to(tl.pointer_type(tl.uint32)) + block
    end = tl.load(starts + tl.where(block_length > 0, 1, 0))
    return tl.load(starts).to(tl.int64), end.to(tl.int64)


@triton.jit(do_not_specialize=[
    "numel", "capacity", "ranges", "range_blocks", "grid_blocks", "nbytes", "positions_at",
])  # fmt: skip
def _check_kernel(
    payloads, verdicts, status,
    numel, capacity, ranges, range_blocks, grid_blocks, nbytes, positions_at,
    KIND: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % grid_blocks
    row = (tl.program_id(0) // grid_blocks).to(tl.int64)  # an index into [ranks, ranges]
    whole = range_numel(numel, range_blocks, row % ranges)
    start = block.to(tl.int64) * BLOCK
    length = tl.minimum(whole - start, BLOCK)
    if (block > 0) & (length <= 0):
        return
    message = payloads + row * nbytes

    lane = tl.arange(0, 8)
    header = tl.load(message.to(tl.pointer_type(tl.int64)) + lane)
    first_word = tl.sum(tl.where(lane == 0, header, 0))
    sizes = tl.sum(tl.where(lane == 2, header, 0))
    count = sizes >> 32 & 0xFFFFFFFF
    expected = tl.where(lane == 0, KIND, tl.where(lane == 1, whole, 0))
    expected = tl.where(lane == 2, count << 32 | capacity, expected)
    known = tl.where(lane == 0, ~(_LOST_NON_FINITE << 56), -1)  # either flag may be set
    wrong = tl.sum(((header & known) != expected).to(tl.int32)) > 0
    wrong = wrong | (count > tl.minimum(whole, capacity))

    first, end = _entries_bounds(message, block, length)
    bad_starts = (first > end) | (end > count) | ((block == 0) & (first != 0))
    last = start + length == whole
    bad_starts = bad_starts | (last & (end != count))
    # A block with more entries than elements is rejected before its positions are read, because
    # they cannot be strictly ascending.
    too_many = end - first > length
    entries = tl.where(wrong | bad_starts | too_many, 0, end - first).to(tl.int32)
    positions = (message + positions_at).to(tl.pointer_type(tl.uint16)) + first
    bad = tl.zeros([ENTRIES], tl.int32)
    begin = entries * 0
    while begin < entries:
        entry = begin + tl.arange(0, ENTRIES)
        inside = entry < entries
        position = tl.load(positions + entry, mask=inside, other=0).to(tl.int32)
        before = tl.load(positions + entry - 1, mask=inside & (entry > 0), other=0).to(tl.int32)
        before = tl.where(entry > 0, before, -1)
        bad |= (inside & ((position >= length) | (position <= before))).to(tl.int32)
        begin += ENTRIES
    bad_positions = too_many | (tl.max(bad) > 0)

    found = tl.where(bad_positions, _POSITIONS, 0)
    found = tl.where(bad_starts, _STARTS, found)
    found = tl.where(wrong, _HEADER, found)
    tl.atomic_or(status + row // ranges, found, mask=found != 0, sem="relaxed")
    # A verdict is the number of entries of the block to add (0 if it is discarded) and a flag.
    verdict = tl.where(found == 0, entries, 0)
    lost_non_finite = (first_word >> 56 & _LOST_NON_FINITE) == _LOST_NON_FINITE
    poisons = lost_non_finite & ~wrong & (block == 0) & (length > 0)
    tl.store(verdicts + tl.program_id(0), tl.where(poisons, verdict | _POISON, verdict))


@triton.jit
def _clear(sums, length, WHOLE: tl.constexpr, ELEMENTS: tl.constexpr):
    for begin in range(0, BLOCK, ELEMENTS):
        element = begin + tl.arange(0, ELEMENTS)
        zeros = tl.zeros([ELEMENTS], tl.float32)
        tl.store(sums + element, zeros, mask=None if WHOLE else element < length)


@triton.jit
def _finish(
    sums, out, factor, poisoned, length, WHOLE: tl.constexpr, ELEMENTS: tl.constexpr
):  # fmt: skip
    for begin in range(0, BLOCK, ELEMENTS):
        element = begin + tl.arange(0, ELEMENTS)
        mask = None if WHOLE else element < length
        total = tl.load(sums + element, mask=mask)
        total = tl.where((element == 0) & (poisoned != 0), float("nan"), total)
        # The addition turns -0.0 into +0.0.
        result = round_to(0.0 + total * factor, out.dtype.element_ty)
        tl.store(out + element, result, mask=mask)


@triton.jit
def _look_up(
    payloads, verdicts, rank, ranks, ranges, range_index, range_blocks, block, nbytes
):  # fmt: skip
    """The message of a rank, its first entry for a block, and its verdict (0 if rank >= ranks)."""
    row = tl.minimum(rank, ranks - 1).to(tl.int64) * ranges + range_index
    verdict = tl.load(verdicts + row * range_blocks + block, mask=rank < ranks, other=0)
    message = payloads + row * nbytes
    starts = (message + HEADER_BYTES).to(tl.pointer_type(tl.uint32))
    first = tl.load(starts + block, mask=rank < ranks, other=0)
    return message, first.to(tl.int64), verdict


@triton.jit
def _load_entries(
    message, first, verdict, at, positions_at, values_at,
    VALUE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The entries from `at` on: their positions, their values, and whether they exist."""
    entry = at + tl.arange(0, ENTRIES)
    inside = entry < (verdict & (_POISON - 1))
    positions = (message + positions_at).to(tl.pointer_type(tl.uint16)) + first
    values = (message + values_at).to(tl.pointer_type(VALUE)) + first
    position = tl.load(positions + entry, mask=inside, other=0).to(tl.int32)
    return position, tl.load(values + entry, mask=inside), inside


@triton.jit
def _add_entries(sums, position, value, inside):
    sum_so_far = tl.load(sums + position, mask=inside)
    tl.store(sums + position, sum_so_far + to_float(value), mask=inside)


@triton.jit(do_not_specialize=[
    "numel", "ranks", "ranges", "range_blocks", "nbytes", "positions_at", "values_at", "scale_bits",
])  # fmt: skip
def _add_kernel(
    payloads, verdicts, sums, out, out_scale,
    numel, ranks, ranges, range_blocks, nbytes, positions_at, values_at, scale_bits,
    VALUE: tl.constexpr, ENTRIES: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % range_blocks
    range_index = (tl.program_id(0) // range_blocks).to(tl.int64)
    begin = (range_index * range_blocks + block) * BLOCK
    length = tl.minimum(numel - begin, BLOCK)
    if length <= 0:
        return
    sums += begin
    out += begin
    if length == BLOCK:  # unmasked, so that accesses are wide
        _clear(sums, length, True, ELEMENTS)
    else:
        _clear(sums, length, False, ELEMENTS)
    tl.debug_barrier()

    # Before adding the entries of a rank, load the next rank's first entries, and the verdict and
    # start of the rank after that. This takes one round trip to memory per rank instead of three.
    poisoned = block * 0
    rank = ranks * 0
    message, first, verdict = _look_up(
        payloads, verdicts, rank, ranks, ranges, range_index, range_blocks, block, nbytes
    )
    next_message, next_first, next_verdict = _look_up(
        payloads, verdicts, rank + 1, ranks, ranges, range_index, range_blocks, block, nbytes
    )
    position, value, inside = _load_entries(
        message, first, verdict, 0, positions_at, values_at, VALUE, ENTRIES
    )
    while rank < ranks:
        next_position, next_value, next_inside = _load_entries(
            next_message, next_first, next_verdict, 0, positions_at, values_at, VALUE, ENTRIES
        )
        later_message, later_first, later_verdict = _look_up(
            payloads, verdicts, rank + 2, ranks, ranges, range_index, range_blocks, block, nbytes
        )
        poisoned |= verdict & _POISON
        _add_entries(sums, position, value, inside)
        at = rank * 0 + ENTRIES
        while at < (verdict & (_POISON - 1)):
            position, value, inside = _load_entries(
                message, first, verdict, at, positions_at, values_at, VALUE, ENTRIES
            )
            _add_entries(sums, position, value, inside)
            at += ENTRIES
        tl.debug_barrier()  # the next rank adds to the sums that this rank wrote
        message, first, verdict = next_message, next_first, next_verdict
        position, value, inside = next_position, next_value, next_inside
        next_message, next_first, next_verdict = later_message, later_first, later_verdict
        rank += 1

    factor = scale_bits.to(tl.int32).to(tl.float32, bitcast=True)
    if out_scale is not None:
        factor *= tl.load(out_scale)
    if length == BLOCK:
        _finish(sums, out, factor, poisoned, length, True, ELEMENTS)
    else:
        _finish(sums, out, factor, poisoned, length, False, ELEMENTS)


def scatter_unpack(
    payloads: Tensor,
    out: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    scale: float = 1.0,
    out_scale: Tensor | None = None,
) -> Tensor:
    numel, device = out.numel(), out.device
    ranks, nbytes = payloads.shape[0], payloads.shape[-1]
    ranges = payloads.shape[1] if payloads.dim() == 3 else 1
    range_blocks = layout.range_blocks(numel, ranges)
    grid_blocks = max(range_blocks, 1)  # even an empty range has a header
    sections = layout.payload_layout(numel, capacity, value_dtype, ranges)

    status = torch.zeros(ranks, dtype=torch.int32, device=device)
    verdicts = torch.empty(ranks * ranges * grid_blocks, dtype=torch.int32, device=device)
    launch(
        _check_kernel, verdicts.numel(),
        payloads, verdicts, status,
        numel, capacity, ranges, range_blocks, grid_blocks, nbytes, sections.positions,
        KIND=layout.header_kind(value_dtype), ENTRIES=ENTRIES,
        device=device,
    )  # fmt: skip
    in_place = out.dtype == torch.float32
    sums = out if in_place else torch.empty(numel, dtype=torch.float32, device=device)
    launch(
        _add_kernel, ranges * range_blocks,
        payloads, verdicts, sums, out, out_scale,
        numel, ranks, ranges, range_blocks, nbytes, sections.positions, sections.values,
        # Rounded once, here. Passed as bits, because Triton 3.6 interprets a float -0.0 as 0.0.
        ctypes.c_int32.from_buffer(ctypes.c_float(scale)).value,
        VALUE=TL_DTYPES[value_dtype], ENTRIES=ENTRIES, ELEMENTS=ELEMENTS,
        device=device, num_warps=16,
    )  # fmt: skip
    return status
