"""Device functions for the blocks of weight patches, shared by the ops on patches."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import patch_layout
from ._launch import launch
from ._numeric import round_to
from ._payload import FLAG_OVERFLOW, HEADER_BYTES

BLOCK = tl.constexpr(patch_layout.BLOCK)
FULL_VALUE = tl.constexpr(patch_layout.FULL_VALUE)
MOST_WORDS = tl.constexpr(patch_layout.MOST_WORDS)
WORD_KEY = tl.constexpr(patch_layout.WORD_KEY)
BLOCK_KEY = tl.constexpr(patch_layout.BLOCK_KEY)
CHUNK = 4096  # blocks that a scan reads together

_GROUPS = tl.constexpr(patch_layout.BLOCK // 4)  # of a block, hashed together
_HEADER = tl.constexpr(1)  # status bits
_NUMBERS = tl.constexpr(2)
_WORDS = tl.constexpr(4)
_OVERFLOW = tl.constexpr(8)


@triton.jit
def load_bits(x, block, numel, DTYPE: tl.constexpr):
    """The bits of the entries of a block as numbers in int32, 0 past the end of the tensor.

    float32 entries are rounded to DTYPE.
    """
    x += block * BLOCK
    i = tl.arange(0, BLOCK)
    if numel - block * BLOCK >= BLOCK:  # unmasked, so that accesses are wide
        loaded = tl.load(x + i)
    else:
        loaded = tl.load(x + i, mask=i < numel - block * BLOCK, other=0.0)
    if loaded.dtype == tl.float32:
        loaded = round_to(loaded, DTYPE)
    return loaded.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def hash_block(bits, block, length):
    """The hashes of the bits of a block, as their share of the checksum. Products wrap."""
    element = tl.arange(0, 4)[None, :]
    group = tl.arange(0, _GROUPS)[:, None]
    shifted = tl.reshape(bits, [_GROUPS, 4]).to(tl.int64) << (element % 2 * 16)
    word = 2 * group.to(tl.int64) + 1  # counted from 1
    low = tl.sum(tl.where(element < 2, shifted, 0), 1)[:, None] + word * WORD_KEY
    high = tl.sum(tl.where(element < 2, 0, shifted), 1)[:, None] + (word + 1) * WORD_KEY
    factor = (word * 0 + 2 * block + 1) * BLOCK_KEY
    hashed = (low & 0xFFFFFFFF) * (high & 0xFFFFFFFF) * factor
    return tl.sum(tl.where(group * 4 < length, hashed, 0))


@triton.jit
def load_numbers(patch, block, mask):
    """The numbers of entries and of words of blocks."""
    numbers = tl.load((patch + HEADER_BYTES).to(tl.pointer_type(tl.int32)) + block, mask=mask)
    return numbers & 0xFFFF, numbers >> 16 & 0xFFFF


@triton.jit(do_not_specialize=["nbytes", "numel", "blocks", "words_at"])
def _scan_kernel(
    patch, starts, verdict, status, nbytes, numel, blocks, words_at,
    KIND: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Validate the header and all numbers, and write the first word of each block, int64.

    A verdict is written in addition to the status, because later programs change the status.
    """
    lane = tl.arange(0, 8)
    header = tl.load(patch.to(tl.pointer_type(tl.int64)) + lane)
    sizes = tl.sum(tl.where(lane == 2, header, 0))
    capacity = sizes & 0xFFFFFFFF
    count = sizes >> 32 & 0xFFFFFFFF
    first_word = tl.sum(tl.where(lane == 0, header, 0))
    expected = tl.where(lane == 0, KIND, tl.where(lane == 1, numel, header * 0))
    expected = tl.where(lane == 2, sizes, expected)
    known = tl.where(lane == 0, ~(FLAG_OVERFLOW << 56), -1)
    wrong = tl.sum(((header & known) != expected).to(tl.int32)) > 0
    overflow = first_word >> 56 != 0
    does_not_fit = (count > capacity) | (words_at + 2 * count > nbytes)

    total = count * 0
    bad = blocks * 0
    chunk = blocks * 0
    while chunk < blocks:
        block = chunk + tl.arange(0, CHUNK)
        inside = block < blocks
        entries, words = load_numbers(patch, block, inside)
        entries = tl.where(inside, entries, 0)
        words = tl.where(inside, words, 0)
        length = numel - block.to(tl.int64) * BLOCK
        invalid = (entries > tl.minimum(length, BLOCK)) | (words < entries) | (words > 2 * entries)
        bad |= tl.max((inside & invalid).to(tl.int32))
        tl.store(starts + block, total + tl.cumsum(words) - words, mask=inside)
        total += tl.sum(words)
        chunk += CHUNK
    found = tl.where((bad != 0) | (total != count), _NUMBERS, 0)
    found = tl.where(does_not_fit, _HEADER, found)
    found = tl.where(overflow, _OVERFLOW, found)
    found = tl.where(wrong, _HEADER, found)
    tl.store(verdict, found)
    tl.store(status, found)


@triton.jit
def load_words(patch, starts, numel, words_at):
    """Load and validate the entries of the block of this program.

    Return their words, whether each exists, whether each has a full value, the pointer to the
    full values, and the status. An invalid block has no entries.
    """
    block = tl.program_id(0).to(tl.int64)
    entries, words = load_numbers(patch, block, None)
    first = (patch + words_at).to(tl.pointer_type(tl.uint16)) + tl.load(starts + block)
    entry = tl.arange(0, BLOCK)
    inside = entry < entries
    word = tl.load(first + entry, mask=inside, other=0).to(tl.int32)
    before = tl.load(first + entry - 1, mask=inside & (entry > 0), other=0).to(tl.int32) >> 4
    before = tl.where(entry > 0, before, -1)
    position = word >> 4
    length = tl.minimum(numel - block * BLOCK, BLOCK)
    wrong = inside & ((position <= before) | (position >= length))
    full = inside & ((word & 15) == FULL_VALUE)
    counted = tl.sum(full.to(tl.int32) + (wrong.to(tl.int32) << 16))
    found = tl.where(counted == words - entries, 0, _WORDS)
    inside = entry < tl.where(found == 0, entries, 0)
    return word, inside, inside & full, first + entries, found


@triton.jit
def report(status, found):
    tl.atomic_or(status, found, mask=found != 0, sem="relaxed")


class Scanned(NamedTuple):
    """A scanned patch. `blocks` is 0 if the size already shows that the patch is invalid."""

    blocks: int
    words_at: int
    starts: Tensor
    verdict: Tensor
    status: Tensor


def scan(patch: Tensor, numel: int, dtype: torch.dtype) -> Scanned:
    """Validate the header and the numbers of a patch."""
    device, words_at = patch.device, patch_layout.words_offset(numel)
    status = torch.ones(1, dtype=torch.int32, device=device)
    verdict = torch.empty(1, dtype=torch.int32, device=device)
    blocks = patch_layout.num_blocks(numel) if patch.numel() >= words_at else 0
    starts = torch.empty(blocks, dtype=torch.int64, device=device)
    if patch.numel() >= words_at:
        launch(
            _scan_kernel, 1,
            patch, starts, verdict, status, patch.numel(), numel, blocks, words_at,
            KIND=patch_layout.header_kind(dtype), CHUNK=CHUNK,
            device=device, num_warps=16,
        )  # fmt: skip
    return Scanned(blocks, words_at, starts, verdict, status)
