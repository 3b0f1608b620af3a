"""How every kernel of this backend is launched."""

import contextlib

import torch
import triton
import triton.language as tl

TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# TRITON_INTERPRET=1: kernels run on CPU tensors, one program after another, without a GPU.
INTERPRETED = triton.knobs.runtime.interpret


def launch(
    kernel, programs: int, *arguments, device: torch.device, num_warps: int = 4, **constants
) -> None:
    """Start `programs` programs of `kernel` on a device, on its current stream.

    Fusion is off, because a fused multiply-add would round once where the other backends round
    twice. A kernel itself lists in `do_not_specialize` the numbers that change from call to call:
    Triton would compile anew for 1 and for multiples of 16.
    """
    if programs == 0:
        return
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)
