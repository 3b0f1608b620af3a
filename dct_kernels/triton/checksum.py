"""checksum: a program hashes one block of 4,096 entries, and adds the sum to the result."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import patch_layout
from ._launch import TL_DTYPES, launch
from ._patch import BLOCK, hash_block, load_bits


@triton.jit(do_not_specialize=["numel"])
def _hash_kernel(weights, result, numel, DTYPE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    bits = load_bits(weights, block, numel, DTYPE)
    hashed = hash_block(bits, block, numel - block * BLOCK)
    tl.atomic_add(result, hashed, sem="relaxed")


def checksum(weights: Tensor) -> Tensor:
    numel, device = weights.numel(), weights.device
    result = torch.zeros(1, dtype=torch.int64, device=device)
    launch(
        _hash_kernel, patch_layout.num_blocks(numel),
        weights, result, numel, DTYPE=TL_DTYPES[weights.dtype],
        device=device, num_warps=8,
    )  # fmt: skip
    return result
