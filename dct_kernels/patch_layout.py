"""The format of weight patches, which is payload version 5 (docs/reference/payload.md):

header (64 bytes) | (u16 entries, u16 words) per block of 4,096 elements | u16 words[capacity]
"""

from typing import NamedTuple

import torch

from .checks import fail, require_int
from .layout import FLAG_OVERFLOW, HEADER_BYTES, MAGIC, read_header

VERSION = 5
BLOCK = 4096  # elements; a position in a block fits 12 bits
DTYPE_CODES = {torch.bfloat16: 1, torch.float16: 2}
LARGEST_STEP = 7  # in magnitude
FULL_VALUE = 8  # the code of a step that does not fit
MOST_WORDS = 2**32 - 1  # the largest capacity and count in a header
# The hash of a checksum, see docs/reference/ops.md.
WORD_KEY = 0x9E3779B1
BLOCK_KEY = 0x9E3779B97F4A7C15 - 2**64  # as a signed integer of 64 bits


class PatchInfo(NamedTuple):
    """The header of a patch.

    Attributes:
        dtype: torch.bfloat16 or torch.float16.
        numel: number of elements of the tensor.
        words: number of 16-bit words that the changes need, at most 2**32 - 1.
        overflow: whether these words exceed the capacity. Such a patch cannot be applied.
        nbytes: bytes to send, a prefix of the patch. With overflow, the bytes that would be needed.
    """

    dtype: torch.dtype
    numel: int
    words: int
    overflow: bool
    nbytes: int


def num_blocks(numel: int) -> int:
    return (numel + BLOCK - 1) // BLOCK


def words_offset(numel: int) -> int:
    """The offset of the words, in bytes."""
    return HEADER_BYTES + 4 * num_blocks(numel)


def header_kind(dtype: torch.dtype) -> int:
    """The first 8 bytes of a header as a number: magic, version and dtype, without flags."""
    return MAGIC | VERSION << 32 | DTYPE_CODES[dtype] << 48


def patch_bytes(numel: int, capacity: int) -> int:
    """Return the size, in bytes, of the patch tensor that `diff_pack` writes, a multiple of 16.

    Args:
        numel: number of elements of the tensor, >= 0.
        capacity: maximum number of 16-bit words, 1 to 2**32 - 1. A changed element takes one word,
            or two if the new value is sent.

    Raises:
        ValueError, TypeError: an argument is invalid.

    >>> patch_bytes(1_000_000, 40_000)
    81056
    """
    require_int("patch_bytes", "numel", numel, 0, 2**63 - 1)
    require_int("patch_bytes", "capacity", capacity, 1, MOST_WORDS)
    return (words_offset(numel) + 2 * capacity + 15) // 16 * 16


def patch_info(patch: torch.Tensor) -> PatchInfo:
    """Return the contents of the header of a patch, uint8 [nbytes]; its first 64 bytes suffice.

    This function copies 64 bytes to the host and synchronizes, so it cannot run in CUDA graphs or
    torch.compile.

    Raises:
        ValueError, TypeError: `patch` is not a patch of this library.
    """
    magic, version, code, flags, numel, _, words, _ = read_header("patch_info", "patch", patch)
    dtypes = {code: dtype for dtype, code in DTYPE_CODES.items()}
    if (magic, version) != (MAGIC, VERSION) or code not in dtypes:
        got = f"magic {magic:#010x}, version {version}, dtype code {code}"
        fail("patch_info", "patch", f"a DCT payload of version {VERSION}", got)
    nbytes = words_offset(numel) + 2 * words
    return PatchInfo(dtypes[code], numel, words, bool(flags & FLAG_OVERFLOW), nbytes)
