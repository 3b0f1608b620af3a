"""What the targets are about, in one run: the ops, a copy of the same bytes, and the peers.

    python bench/gpu/bench.py OUT [--seconds 95]

Cases and timing are those of `dct-bench kernels`, which says how they are measured; here is which
of them, the most important first. Up to a bucket of 25 MB every case is timed twice: called, and
replayed from a CUDA graph. bench.json and bench.md are written after every case.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from common import BF16, BUCKET, F32, PICKS, gpu_backends, report

from dct_bench import provenance
from dct_bench.kernels import cases
from dct_bench.kernels import command as kernels
from dct_bench.kernels.arguments import ROUNDS
from dct_bench.kernels.cases import Case
from dct_kernels import payload_layout
from dct_kernels.layout import E3M0
from dct_kernels.row_layout import SCALED_BY_ROW

ROWS = 65536
LARGEST, SWEEP = 2**28, 2**26
NOTHING, EVERYTHING = 1e-12, 1.0  # densities whose threshold is infinity, and zero


def all_cases(device: str, scale: int) -> Iterator[Case]:
    """Made one at a time: each holds its buffers. All sizes are divided by `scale`."""
    largest, sweep, rows = LARGEST // scale, SWEEP // scale, ROWS // scale
    yield from one_dimensional(device, largest, 0.01)
    for width in (64, 128, 256, 512, 1024):
        for density in (0.05, 0.1):
            yield cases.row_pack(device, rows, width, density, density == 0.05)
            yield cases.row_unpack(device, rows, width, density, False)
        yield cases.row_pack(device, rows, width, 0.05, False, BF16)
        for format in SCALED_BY_ROW:
            yield cases.row_quantize(device, rows, width, format, width == 128)
            yield cases.row_dequantize(device, rows, width, format, width == 128)
    for grad, values in ((F32, F32), (BF16, BF16), (None, BF16)):
        yield cases.mask_pack(device, sweep, 0.01, grad, values, False, cases.SEGMENTS)
        yield cases.mask_pack(device, BUCKET // scale, 0.01, grad, values, False, cases.SEGMENTS)
    for density in (NOTHING, EVERYTHING, 0.1):
        yield cases.mask_pack(device, sweep, density, F32, F32, False)
    yield cases.mask_pack(device, sweep, 0.01, F32, F32, False, clustered=True)
    yield cases.mask_pack(device, sweep, 0.01, None, F32, False, clustered=True)
    yield cases.mask_pack(device, sweep, 0.01, F32, F32, False, misaligned=True)
    yield overflow(device, sweep)
    for numel in (2**24, 2**20, 2**26, 2**22):
        yield from one_dimensional(device, numel // scale, 0.01)
    for numel in (LARGEST, 2**24):
        for density in (0.001, 0.005):
            yield from one_dimensional(device, numel // scale, density)


def one_dimensional(device: str, numel: int, density: float) -> Iterator[Case]:
    formats = (F32, F32), (F32, BF16), (F32, E3M0), (BF16, BF16), (None, F32), (None, BF16)
    for grad, values in formats:
        yield cases.mask_pack(device, numel, density, grad, values, True)
    for most in (PICKS, cases.SAMPLES):
        yield cases.sample_threshold(device, numel, density, most=most)
    for ranks, values in ((2, BF16), (8, BF16), (8, E3M0)):
        yield cases.scatter_unpack(device, numel, density, ranks, values)


def overflow(device: str, numel: int) -> Case:
    """All pass, and there is room for 1 %: what mask_pack wrote as sent is written back."""
    clean, grad = (torch.randn(numel, device=device) for _ in range(2))
    residual, capacity = clean.clone(), numel // 100
    nbytes = payload_layout(numel, capacity, F32).nbytes
    payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    seen = torch.zeros(1, dtype=torch.int32, device=device)
    segments, tau = torch.tensor([0, numel], device=device), torch.zeros(1, device=device)

    def run(ops, i):
        ops.mask_pack(residual, grad, segments, tau, payload, seen, capacity, F32)
        return residual, payload, seen

    return Case(
        "mask_pack",
        "overflow: all pass, room for 1 %",
        numel,
        12 * numel + 6 * capacity + 4 * (numel - capacity),
        1,
        run,
        reset=lambda i: residual.copy_(clean),
        density=1.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=95, help="begin no case after so long")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes by this")
    args = parser.parse_args()
    ours = "cpp" if args.device == "cpu" else "cuda"
    if ours == "cuda":
        gpu_backends()
    torch.manual_seed(0)
    start, about = time.monotonic(), provenance.describe()
    results, failures, said = [], [], ""
    for case in all_cases(args.device, args.scale):
        if time.monotonic() - start > args.seconds:
            said = f"; stopped after {args.seconds:.0f} s, the rest is not measured"
            break
        try:
            for result in measure(case, args.device):
                results.append(result)
        except (RuntimeError, SystemExit) as error:  # wrong, or out of memory: the next one
            failures.append(str(error).splitlines()[0])
            print(failures[-1], flush=True)
        write(args.out, about, results)
    report(failures, f"{len(results)} cases{said}")


def measure(case: Case, device: str) -> Iterator[dict]:
    """Called; and, where launching takes longer than running, replayed from a CUDA graph."""
    for graphs in (False, True):
        if graphs and (device == "cpu" or case.numel > BUCKET):
            return
        options = argparse.Namespace(device=device, rounds=ROUNDS, graphs=graphs)
        result = kernels.measure(case, options) | {"graphs": graphs}
        for line in kernels.lines(result):
            print(line, "in a graph" if graphs else "", flush=True)
        yield result
        case.peers = {}


def write(out: Path, about: dict, results: list[dict]) -> None:
    content = {"torch": torch.__version__, "provenance": about, "results": results}
    (out / "bench.json").write_text(json.dumps(content, indent=1))
    lines = [f"{about['gpu'] or about['cpu']}, torch {about['torch']}", "", *kernels.HEADER]
    for result in results:
        suffix = " in a graph |" if result["graphs"] else " |"
        lines += [line.removesuffix(" |") + suffix for line in kernels.lines(result)]
    (out / "bench.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
