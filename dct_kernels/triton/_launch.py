"""How every kernel of this backend is launched."""

import contextlib
import functools

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
    if device.type == "cuda":
        _require_sound_assembler(device)
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)


@functools.cache
def _require_sound_assembler(device: torch.device) -> None:
    """Triton 3.6 has an assembler that always fuses on Blackwell.

    The one of CUDA 12.9 turns mul.rn.f32x2 and add.rn.f32x2 into FFMA2, so that sums would differ
    from the other backends' in their last bit.
    """
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    if old and torch.version.cuda and torch.cuda.get_device_capability(device)[0] >= 10:
        raise RuntimeError(
            "dct::triton: triton must be >= 3.7 on GPUs of compute capability 10 and above, "
            f"because the assembler of older ones fuses multiply-adds, got {triton.__version__}"
        )
