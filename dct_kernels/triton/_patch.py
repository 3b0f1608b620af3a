"""The numbers of the blocks of weight patches, for the ops that write or read patches."""

import triton
import triton.language as tl

from .. import patch_layout
from ._payload import HEADER_BYTES

BLOCK = tl.constexpr(patch_layout.BLOCK)
FULL_VALUE = tl.constexpr(patch_layout.FULL_VALUE)

CHUNK = tl.constexpr(4096)  # blocks that a scan reads together


@triton.jit
def load_numbers(patch, block, mask):
    """The numbers of entries and of words of blocks."""
    numbers = tl.load((patch + HEADER_BYTES).to(tl.pointer_type(tl.int32)) + block, mask, 0)
    return numbers & 0xFFFF, numbers >> 16 & 0xFFFF


@triton.jit
def scan_numbers(patch, starts, numel, blocks):
    """Write the first word of each block, int64.

    Return the number of all words, and whether a block has invalid numbers.
    """
    total = tl.zeros([], tl.int64)
    invalid = blocks * 0
    chunk = blocks * 0
    while chunk < blocks:
        block = chunk + tl.arange(0, CHUNK)
        inside = block < blocks
        entries, words = load_numbers(patch, block, inside)
        length = numel - block.to(tl.int64) * BLOCK
        bad = (entries > tl.minimum(length, BLOCK)) | (words < entries) | (words > 2 * entries)
        invalid |= tl.max((inside & bad).to(tl.int32))
        tl.store(starts + block, total + tl.cumsum(words) - words, mask=inside)
        total += tl.sum(words)
        chunk += CHUNK
    return total, invalid != 0
