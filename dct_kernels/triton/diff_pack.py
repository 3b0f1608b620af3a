"""diff_pack: compares bits and packs the entries that differ, in three kernels.

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
from ._patch import (
    BLOCK,
    CHUNK,
    FULL_VALUE,
    MOST_WORDS,
    hash_block,
    load_bits,
    load_numbers,
)
from ._payload import FLAG_OVERFLOW, HEADER_BYTES, write_header


@triton.jit
def _compare(weights, snapshot, numel, DTYPE: tl.constexpr):
    """Return, for this program's block: new bits, old bits, what differs, codes, full values."""
    block = tl.program_id(0).to(tl.int64)
    new = load_bits(weights, block, numel, DTYPE)
    old = load_bits(snapshot, block, numel, DTYPE)
    step = new - old
    small = ((step + 7) & 0xFFFF) <= 14
    code = tl.where(small, step & 15, FULL_VALUE)
    return new, old, new != old, code, ~small


@triton.jit(do_not_specialize=["numel"])
def _count_kernel(weights, snapshot, patch, checksums, numel, DTYPE: tl.constexpr):
    new, old, differs, _, full = _compare(weights, snapshot, numel, DTYPE)
    counted = tl.sum(differs.to(tl.int32) + (full.to(tl.int32) << 16))
    entries = counted & 0xFFFF
    block = tl.program_id(0).to(tl.int64)
    numbers = (patch + HEADER_BYTES).to(tl.pointer_type(tl.int32)) + block
    tl.store(numbers, entries | (entries + (counted >> 16)) << 16)
    if checksums is not None:
        length = numel - block * BLOCK
        tl.atomic_add(checksums, hash_block(old, block, length), sem="relaxed")
        tl.atomic_add(checksums + 1, hash_block(new, block, length), sem="relaxed")


@triton.jit(do_not_specialize=["numel", "blocks", "capacity"])
def _scan_kernel(
    patch, starts, numel, blocks, capacity, KIND: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    total = tl.zeros([], tl.int64)
    chunk = blocks * 0
    while chunk < blocks:
        block = chunk + tl.arange(0, CHUNK)
        inside = block < blocks
        _, words = load_numbers(patch, block, inside)
        words = tl.where(inside, words, 0)
        tl.store(starts + block, total + tl.cumsum(words) - words, mask=inside)
        total += tl.sum(words)
        chunk += CHUNK
    flags = tl.where(total > capacity, FLAG_OVERFLOW, 0).to(tl.int64)
    write_header(patch, numel, capacity, tl.minimum(total, MOST_WORDS), flags, KIND)


@triton.jit(do_not_specialize=["numel", "capacity", "words_at"])
def _pack_kernel(
    weights, snapshot, patch, starts, numel, capacity, words_at, DTYPE: tl.constexpr
):  # fmt: skip
    new, _, differs, code, full = _compare(weights, snapshot, numel, DTYPE)
    start = tl.load(starts + tl.program_id(0).to(tl.int64))
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
    blocks = patch_layout.num_blocks(numel)
    dtype = TL_DTYPES[snapshot.dtype]
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
        patch, starts, numel, blocks, capacity,
        KIND=patch_layout.header_kind(snapshot.dtype), CHUNK=CHUNK,
        device=device, num_warps=16,
    )  # fmt: skip
    launch(
        _pack_kernel, blocks,
        weights, snapshot, patch, starts, numel, capacity, patch_layout.words_offset(numel),
        DTYPE=dtype,
        device=device, num_warps=8,
    )  # fmt: skip
