"""Gradients of the row ops through CUDA tensors: those on the CPU, bit for bit.

python bench/gpu/gradients.py
"""

import torch
from common import BF16, F32, ROWS, gpu_backends, report, same
from torch import Tensor

from dct_kernels import row_gather, row_pack, row_unpack

SHAPES = ((40, 6), (200, 9), (3000, 50))  # a bitmap, columns of one byte and of two


def gradients(x: Tensor, k: int, value_dtype: torch.dtype) -> dict[str, Tensor]:
    """Of all three ops, at weights drawn once for all devices; on the device of x."""
    width, draw = x.shape[1], torch.Generator().manual_seed(1)
    x = x.detach().requires_grad_()
    weights = torch.randn(len(x), k, generator=draw).to(x.device, value_dtype)
    wide = torch.randn(x.shape, generator=draw).to(x.device, x.dtype)
    values, positions = row_pack(x, k, value_dtype)
    kept = values.detach().requires_grad_()
    dense = row_unpack(kept, positions, width, x.dtype)
    return {
        "row_pack": torch.autograd.grad(values, x, weights)[0],
        "row_gather": torch.autograd.grad(row_gather(x, positions, k, value_dtype), x, weights)[0],
        "row_unpack": torch.autograd.grad(dense, kept, wide)[0],
    }


def main() -> None:
    gpu_backends()
    failures = []
    for width, k in SHAPES:
        for dtype, value_dtype in ((F32, F32), (F32, BF16), (BF16, BF16)):
            x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width)).to(dtype)
            on_cpu, on_gpu = (gradients(x.to(device), k, value_dtype) for device in ("cpu", "cuda"))
            for op, expected in on_cpu.items():
                label = f"{op} [{ROWS}, {width}], {k} of {dtype} as {value_dtype}"
                right = on_gpu[op].is_cuda and same([on_gpu[op]], [expected])
                print(f"{label}: {'right' if right else 'WRONG'}", flush=True)
                failures += [] if right else [label]
    report(failures, "gradients on CUDA tensors equal those on the CPU")


if __name__ == "__main__":
    main()
