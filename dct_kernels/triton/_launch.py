"""Launches the kernels of this backend."""

import contextlib
import functools

import torch
import triton
import triton.language as tl

from .. import checks

TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# With TRITON_INTERPRET=1, kernels run on the CPU, one program after the other, without a GPU.
INTERPRETED = triton.knobs.runtime.interpret


def launch(
    kernel, programs: int, *arguments, device: torch.device, num_warps: int = 4, **constants
) -> None:
    """Start `programs` programs of `kernel` on the current stream of a device.

    Fusion is off, because a fused multiply-add rounds once and the other backends round twice. A
    kernel lists the numbers that change between calls in `do_not_specialize`. Otherwise Triton
    would compile the kernel again for 1 and for multiples of 16.
    """
    if programs == 0:
        return
    if device.type == "cuda":
        _require_sound_assembler(device)
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)


@functools.cache
def _require_sound_assembler(device: torch.device) -> None:
    """Reject Triton before 3.7 on Blackwell, where its assembler always fuses multiply-adds.

    That assembler turns mul.rn.f32x2 and add.rn.f32x2 into FFMA2. So the last bits of sums would
    differ from the sums of the other backends.
    """
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    if old and torch.version.cuda and torch.cuda.get_device_capability(device)[0] >= 10:
        rule = ">= 3.7 on GPUs of compute capability 10 and above, because older versions always "
        rule += "fuse multiply-adds there"
        checks.fail("triton", "triton", rule, triton.__version__, RuntimeError)
