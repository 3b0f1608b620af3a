"""Kernels with the defects that the compile tests must detect."""

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(x, out, numel, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    elements = tl.load(x + index, mask=index < numel, other=0)
    total = elements * 3.0 + tl.sum(elements)
    tl.store(out + index, total + elements, mask=index < numel)


def _launch(block: int, numel: int, **options) -> None:
    x = torch.empty(numel)
    _kernel[(1,)](x, torch.empty_like(x), numel, BLOCK=block, num_warps=1, **options)


def fused() -> None:
    """Multiplies and adds with the compiler's default options."""
    _launch(256, 256, enable_fp_fusion=True)


def narrow() -> None:
    """Accesses a tensor whose length is not a multiple of the elements in a wide access."""
    _launch(256, 255, enable_fp_fusion=False)


def spilling() -> None:
    """Holds more elements than fit in the registers of a warp."""
    _launch(32768, 32768, enable_fp_fusion=False)
