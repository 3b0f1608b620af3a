"""Measures the time of each kernel with torch.profiler, and writes profile.json.

With --once, measures nothing, and marks one call of each case for NVIDIA's profilers.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import files, provenance
from bench.cli import exit_status
from bench.gpu.common import BF16, F32, gpu_backends, report
from bench.microbench import cases
from bench.microbench.cases import Case
from dct_kernels.testing import backends

NUMEL, ROWS, CALLS = 2**26, 65536, 4


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


def times(case: Case, ops: SimpleNamespace) -> dict[str, float]:
    """{kernel or memset: microseconds per call}, for buffers that are not in a cache."""
    sets, total = [i % case.sets for i in range(CALLS)], {}
    case.run(ops, 0)
    for i in sets:
        case.reset(i)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            case.run(ops, i)
            torch.cuda.synchronize()
        for event in profiler.key_averages():
            if event.device_type == DeviceType.CUDA:
                total[event.key] = total.get(event.key, 0.0) + event.self_device_time_total
    return {kernel: us / CALLS for kernel, us in total.items()}


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--once", action="store_true", help="call each case once; measure nothing")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes by this number")
    cpu = "with cpu, call the eager ops once and measure nothing"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help=cpu)
    args = parser.parse_args()
    ops, found = gpu_backends()["cuda"] if args.device == "cuda" else backends()["eager"], []
    content = {"provenance": provenance.describe(), "calls": found}
    torch.manual_seed(0)
    for case in chosen(args.device, args.scale):
        if args.once or args.device == "cpu":
            once(case, ops)
            continue
        found.append({"op": case.op, "case": case.detail, "us": times(case, ops)})
        print(case.op, case.detail)
        for kernel, us in found[-1]["us"].items():
            print(f"  {us:9.1f} us  {kernel}", flush=True)
        files.write_json(args.out / "profile.json", content)
    kernels = sum(len(result["us"]) for result in found)
    failures = [] if kernels or not found else ["torch.profiler saw no kernel"]
    report(failures, f"{kernels} kernels and memory sets in {len(found)} calls")


if __name__ == "__main__":
    raise SystemExit(exit_status("profile_ops.py", main))
