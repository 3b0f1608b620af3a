"""diff_pack, which compares bits and packs the entries that differ in three kernels, and checksum.

count  per block: writes the numbers of entries and of words, and adds to the checksums.
scan   turns the numbers of words into the first word of each block, and writes the header.
pack   per block: compares the bits again, and writes the words.

No program waits for another. Compared with a single pass, the tensors are read twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import patch_layout
from ._launch import TL_DTYPES, launch
from ._numeric import round_to
from ._patch import BLOCK, FULL_VALUE, scan_numbers
from ._payload import FLAG_OVERFLOW, HEADER_BYTES, write_header

_LARGEST_STEP = tl.constexpr(patch_layout.LARGEST_STEP)
_MOST_WORDS = tl.constexpr(patch_layout.MOST_WORDS)
_WORD_KEY = tl.constexpr(patch_layout.WORD_KEY)
_BLOCK_KEY = tl.constexpr(patch_layout.BLOCK_KEY)
_GROUPS = tl.constexpr(patch_layout.BLOCK // 4)  # of a block, hashed together


@triton.jit
def _load_bits(x, numel, DTYPE: tl.constexpr):
    """The bits of the entries of this program's block in int32, 0 past the end of the tensor.

    float32 entries are rounded to DTYPE.
    """
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    if numel - begin >= BLOCK:  # unmasked, so that accesses are wide
        loaded = tl.load(x + begin + i)
    else:
        loaded = tl.load(x + begin + i, mask=i < numel - begin, other=0.0)
    if loaded.dtype == tl.float32:
        loaded = round_to(loaded, DTYPE)
    return loaded.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _add_hashes(bits, numel, checksum):
    """Add the hashes of the bits of this program's block to a checksum. Products wrap."""
    block = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, 4)[None, :]
    group = tl.arange(0, _GROUPS)[:, None].to(tl.int64)
    shifted = tl.reshape(bits, [_GROUPS, 4]).to(tl.int64) << (element % 2 * 16)
    word = 2 * group + 1  # counted from 1
    low = tl.sum(tl.where(element < 2, shifted, 0), 1)[:, None] + word * _WORD_KEY
    high = tl.sum(tl.where(element < 2, 0, shifted), 1)[:, None] + (word + 1) * _WORD_KEY
    factor = (word * 0 + 2 * block + 1) * _BLOCK_KEY
    hashed = (low & 0xFFFFFFFF) * (high & 0xFFFFFFFF) * factor
    total = tl.sum(tl.where(block * BLOCK + group * 4 < numel, hashed, 0))
    tl.atomic_add(checksum, total, sem="relaxed")


@triton.jit(do_not_specialize=["numel"])
def _checksum_kernel(weights, result, numel, DTYPE: tl.constexpr):
    _add_hashes(_load_bits(weights, numel, DTYPE), numel, result)


@triton.jit
def _code(new, old):
    """The codes of steps, and whether a full value follows."""
    step = new - old
    full = ((step + _LARGEST_STEP) & 0xFFFF) > 2 * _LARGEST_STEP
    return tl.where(full, FULL_VALUE, step & 15), full


@triton.jit(do_not_specialize=["numel"])
def _count_kernel(weights, snapshot, patch, checksums, numel, DTYPE: tl.constexpr):
    new, old = _load_bits(weights, numel, DTYPE), _load_bits(snapshot, numel, DTYPE)
    _, full = _code(new, old)
    counted = tl.sum((new != old).to(tl.int32) + (full.to(tl.int32) << 16))
    entries = counted & 0xFFFF
    numbers = (patch + HEADER_BYTES).to(tl.pointer_type(tl.int32)) + tl.program_id(0)
    tl.store(numbers, entries | (entries + (counted >> 16)) << 16)
    if checksums is not None:
        _add_hashes(old, numel, checksums)
        _add_hashes(new, numel, checksums + 1)


@triton.jit(do_not_specialize=["numel", "blocks", "capacity"])
def _scan_kernel(patch, starts, numel, blocks, capacity, KIND: tl.constexpr):
    total, _ = scan_numbers(patch, starts, numel, blocks)
    flags = tl.where(total > capacity, FLAG_OVERFLOW, 0).to(tl.int64)
    write_header(patch, numel, capacity, tl.minimum(total, _MOST_WORDS), flags, KIND)


@triton.jit(do_not_specialize=["numel", "capacity", "words_at"])
def _pack_kernel(
    weights, snapshot, patch, starts, numel, capacity, words_at, DTYPE: tl.constexpr
):  # fmt: skip
    new, old = _load_bits(weights, numel, DTYPE), _load_bits(snapshot, numel, DTYPE)
    code, full = _code(new, old)
    differs = new != old
    start = tl.load(starts + tl.program_id(0))
    words = (patch + words_at).to(tl.pointer_type(tl.uint16))
    entry = start + tl.cumsum(differs.to(tl.int32)) - 1
    value = start + tl.sum(differs.to(tl.int32)) + tl.cumsum(full.to(tl.int32)) - 1
    word = tl.arange(0, BLOCK) << 4 | code
    tl.store(words + entry, word.to(tl.uint16), mask=differs & (entry < capacity))
    tl.store(words + value, new.to(tl.uint16), mask=full & (value < capacity))


def diff_pack(
    weights: Tensor, snapshot: Tensor, patch: Tensor, checksums: Tensor | None, capacity: int
) -> None:
    numel, device = snapshot.numel(), snapshot.device
    blocks, dtype = patch_layout.num_blocks(numel), TL_DTYPES[snapshot.dtype]
    starts = torch.empty(blocks, dtype=torch.int64, device=device)  # the first word of each block
    if checksums is not None:
        checksums.zero_()
    launch(
        _count_kernel, blocks,
        weights, snapshot, patch, checksums, numel, DTYPE=dtype,
        device=device, num_warps=8,
    )  # fmt: skip
    launch(
        _scan_kernel, 1,
        patch, starts, numel, blocks, capacity, KIND=patch_layout.header_kind(snapshot.dtype),
        device=device, num_warps=16,
    )  # fmt: skip
    launch(
        _pack_kernel, blocks,
        weights, snapshot, patch, starts, numel, capacity, patch_layout.words_offset(numel),
        DTYPE=dtype,
        device=device, num_warps=8,
    )  # fmt: skip


def checksum(weights: Tensor) -> Tensor:
    numel, device = weights.numel(), weights.device
    result = torch.zeros(1, dtype=torch.int64, device=device)
    launch(
        _checksum_kernel, patch_layout.num_blocks(numel),
        weights, result, numel, DTYPE=TL_DTYPES[weights.dtype],
        device=device, num_warps=8,
    )  # fmt: skip
    return result
