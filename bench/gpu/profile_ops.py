"""Calls each op, and marks one call of each case for NVIDIA's profilers. Measures nothing."""

import argparse
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from bench.gpu.common import BF16, F32, gpu_backends, report
from bench.microbench import cases
from bench.microbench.cases import Case
from dct_kernels.testing import backends

NUMEL, ROWS = 2**26, 65536


def chosen(device: str, scale: int = 1) -> Iterator[Case]:
    numel, rows = NUMEL // scale, ROWS // scale
    for grad, values in ((F32, F32), (BF16, BF16)):
        yield cases.mask_pack(device, numel, 0.01, grad, values)
    yield cases.scatter_unpack(device, numel, 0.01, 8)
    yield cases.sample_threshold(device, numel, 0.01)
    for format in ("bfloat16", "int4", "ternary"):
        yield cases.quantize_pack(device, numel, F32, format)
        yield cases.dequantize_sum(device, numel, format, 2)
    yield cases.diff_pack(device, numel, 0.03, True)
    yield cases.patch_apply(device, numel, 0.03)
    yield cases.row_pack(device, rows, 1024, 0.05)
    yield cases.row_pack(device, rows, 256, 0.05, BF16)
    yield cases.row_unpack(device, rows, 256, 0.05)
    yield cases.row_quantize(device, rows, 256, "int4")
    yield cases.row_dequantize(device, rows, 256, "int4")
    yield cases.row_dequantize_sum(device, rows, 256, "int4", 4)


def once(case: Case, ops: SimpleNamespace) -> None:
    case.run(ops, 0)  # loads the CUDA module
    case.reset(0)
    if ops.device == "cpu":
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    case.run(ops, 0)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes by this number")
    cpu = "with cpu, call the eager ops, to test the program"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help=cpu)
    args = parser.parse_args()
    ops = gpu_backends()["cuda"] if args.device == "cuda" else backends()["eager"]
    torch.manual_seed(0)
    for case in chosen(args.device, args.scale):
        once(case, ops)
    report([], "every op was called")


if __name__ == "__main__":
    main()
