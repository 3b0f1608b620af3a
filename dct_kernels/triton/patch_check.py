"""patch_check: validates a patch, in two kernels.

scan   validates the header and the numbers of all blocks, and finds the first word of each block.
check  per block: validates the words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import launch
from ._patch import load_words, report, scan


@triton.jit(do_not_specialize=["numel", "words_at"])
def _check_kernel(patch, starts, verdict, status, numel, words_at):
    if tl.load(verdict) != 0:
        return
    _, _, _, _, found = load_words(patch, starts, numel, words_at)
    report(status, found)


def patch_check(patch: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    scanned = scan(patch, numel, dtype)
    launch(
        _check_kernel, scanned.blocks,
        patch, scanned.starts, scanned.verdict, scanned.status, numel, scanned.words_at,
        device=patch.device, num_warps=8,
    )  # fmt: skip
    return scanned.status
