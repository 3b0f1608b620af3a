"""patch_check and patch_apply: validate a patch, and set the changed entries, in two kernels.

scan   validates the header and the numbers of all blocks, and finds the first word of each block.
apply  per block: validates the words. If they are valid and there are weights, sets the entries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import patch_layout
from ._launch import launch
from ._patch import BLOCK, FULL_VALUE, load_numbers, scan_numbers
from ._payload import FLAG_OVERFLOW

_HEADER = tl.constexpr(1)  # status bits
_NUMBERS = tl.constexpr(2)
_WORDS = tl.constexpr(4)
_OVERFLOW = tl.constexpr(8)


@triton.jit(do_not_specialize=["nbytes", "numel", "blocks", "words_at"])
def _scan_kernel(patch, starts, status, nbytes, numel, blocks, words_at, KIND: tl.constexpr):
    header = patch.to(tl.pointer_type(tl.int64))
    kind, sizes = tl.load(header), tl.load(header + 2)
    capacity, count = sizes & 0xFFFFFFFF, sizes >> 32 & 0xFFFFFFFF
    lane = tl.arange(0, 8)
    reserved = tl.max((tl.load(header + lane, lane > 2, 0) != 0).to(tl.int32))
    wrong = (kind & ~(FLAG_OVERFLOW << 56)) != KIND
    wrong |= (tl.load(header + 1) != numel) | (reserved != 0)
    total, invalid = scan_numbers(patch, starts, numel, blocks)
    found = tl.where(invalid | (total != count), _NUMBERS, 0)
    found = tl.where((count > capacity) | (words_at + 2 * count > nbytes), _HEADER, found)
    found = tl.where(kind >> 56 != 0, _OVERFLOW, found)
    tl.store(status, tl.where(wrong, _HEADER, found))


@triton.jit(do_not_specialize=["numel", "words_at"])
def _apply_kernel(patch, starts, status, weights, numel, words_at):
    if (tl.load(status) & ~_WORDS) != 0:  # other programs set the flag _WORDS
        return
    block = tl.program_id(0).to(tl.int64)
    entries, words = load_numbers(patch, block, block >= 0)
    first = (patch + words_at).to(tl.pointer_type(tl.uint16)) + tl.load(starts + block)
    entry = tl.arange(0, BLOCK)
    inside = entry < entries
    word = tl.load(first + entry, mask=inside, other=0).to(tl.int32)
    before = tl.load(first + entry - 1, mask=inside & (entry > 0), other=0).to(tl.int32) >> 4
    before = tl.where(entry > 0, before, -1)
    position = word >> 4
    wrong = inside & ((position <= before) | (position >= numel - block * BLOCK))
    full = inside & ((word & 15) == FULL_VALUE)
    counted = tl.sum(full.to(tl.int32) + (wrong.to(tl.int32) << 16))
    found = tl.where(counted == words - entries, 0, _WORDS)
    tl.atomic_or(status, found, mask=found != 0, sem="relaxed")
    if weights is not None:
        inside = entry < tl.where(found == 0, entries, 0)
        full &= inside
        weight = weights + block * BLOCK + position
        old = tl.load(weight, mask=inside, other=0).to(tl.int32)
        value = first + entries + tl.cumsum(full.to(tl.int32)) - 1
        value = tl.load(value, mask=full, other=0).to(tl.int32)
        new = tl.where(full, value, old + (word & 15 ^ 8) - 8)
        tl.store(weight, new.to(tl.int16), mask=inside)


def patch_check(patch: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return _read(patch, numel, dtype, None)


def patch_apply(patch: Tensor, weights: Tensor) -> Tensor:
    return _read(patch, weights.numel(), weights.dtype, weights.view(torch.int16))


def _read(patch: Tensor, numel: int, dtype: torch.dtype, weights: Tensor | None) -> Tensor:
    device, words_at = patch.device, patch_layout.words_offset(numel)
    status = torch.ones(1, dtype=torch.int32, device=device)
    if patch.numel() < words_at:
        return status
    blocks = patch_layout.num_blocks(numel)
    starts = torch.empty(blocks, dtype=torch.int64, device=device)
    launch(
        _scan_kernel, 1,
        patch, starts, status, patch.numel(), numel, blocks, words_at,
        KIND=patch_layout.header_kind(dtype),
        device=device, num_warps=16,
    )  # fmt: skip
    launch(
        _apply_kernel, blocks,
        patch, starts, status, weights, numel, words_at,
        device=device, num_warps=8,
    )  # fmt: skip
    return status
