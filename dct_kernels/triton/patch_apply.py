"""patch_apply: validates a patch and sets the changed entries, in two kernels.

scan   validates the header and the numbers of all blocks, and finds the first word of each block.
apply  per block: validates the words, and sets the entries if they are valid.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import launch
from ._patch import BLOCK, load_words, report, scan


@triton.jit(do_not_specialize=["numel", "words_at"])
def _apply_kernel(patch, starts, verdict, status, weights, numel, words_at):
    if tl.load(verdict) != 0:
        return
    word, inside, full, values, found = load_words(patch, starts, numel, words_at)
    report(status, found)
    weight = weights + tl.program_id(0).to(tl.int64) * BLOCK + (word >> 4)
    old = tl.load(weight, mask=inside, other=0).to(tl.int32)
    value = tl.load(values + tl.cumsum(full.to(tl.int32)) - 1, mask=full, other=0)
    new = tl.where(full, value.to(tl.int32), old + (word & 15 ^ 8) - 8)
    tl.store(weight, new.to(tl.int16), mask=inside)


def patch_apply(patch: Tensor, weights: Tensor) -> Tensor:
    numel = weights.numel()
    scanned = scan(patch, numel, weights.dtype)
    launch(
        _apply_kernel, scanned.blocks,
        patch, scanned.starts, scanned.verdict, scanned.status, weights.view(torch.int16),
        numel, scanned.words_at,
        device=patch.device, num_warps=8,
    )  # fmt: skip
    return scanned.status
