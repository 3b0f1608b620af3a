"""Compares the ops with a copy of the same number of bytes, and with other methods.

Cases and timing are from bench.kernels. The most important cases come first. Cases of at most
25 MiB are timed twice: called directly, and replayed from a CUDA graph. time.json (or sizes.json)
is written after each case. At the end, the program prints which speeds meet their targets.
"""

import argparse
import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import files, provenance
from bench.cli import exit_status
from bench.gpu.common import BF16, BUCKET, F32, PICKS, gpu_backends, report
from bench.microbench import cases
from bench.microbench import command as kernels
from bench.microbench.arguments import ROUNDS
from bench.microbench.cases import Case
from bench.microbench.report import COPY, COPY_KERNEL, HEADER, row
from bench.tables import line
from dct_kernels.layout import QUANTIZED_CODES
from dct_kernels.row_layout import FORMATS

ROWS, LARGEST = 65536, 2**28
GRADS = ((F32, F32), (BF16, BF16), (F32, BF16))  # dtypes of gradients and values
NOTHING, EVERYTHING = 1e-12, 1.0  # densities
# {(op, end of the case's name, number of elements or None): required fraction of a copy's speed}.
# row_pack searches, and scatter_unpack writes many payloads in random order, so they need less.
OF_COPY = {
    ("mask_pack", "float32 grad, float32 values", LARGEST): 0.93,
    ("mask_pack", "bfloat16 grad, bfloat16 values", LARGEST): 0.93,
    ("mask_pack", " grad, float32 values", 2**24): 0.85,
    ("scatter_unpack", "P=8", LARGEST): 0.9,
    ("scatter_unpack", "P=64", LARGEST): 0.75,
    **{("quantize_pack", f" grad, {f}", LARGEST): 0.9 for f in ("bfloat16", "int8", "int4")},
    ("quantize_pack", " grad, ternary", LARGEST): 0.8,
    **{("dequantize_sum", f"P=2, {f}", LARGEST): 0.9 for f in ("bfloat16", "int8", "int4")},
    ("dequantize_sum", "P=2, ternary", LARGEST): 0.8,
    ("row_unpack", "", None): 0.9,
    ("row_quantize", "", None): 0.9,
    ("row_dequantize", "", None): 0.9,
    **{("row_pack", f", {d}], k={math.ceil(d / 20)}", None): 0.7 for d in (256, 512, 1024)},
}
# Required speedups of the largest mask_pack over peers. 0.9 of a copy's speed is always enough.
FASTER_THAN = {"topk": 20, "triton": 1}
SAMPLING = 0.03  # maximum time of sampling, as a fraction of mask_pack's time


def chosen(device: str, scale: int, peers: bool = True) -> Iterator[Case]:
    """Yield cases one at a time, because each case holds its buffers. `scale` divides all sizes."""
    sweep = 2**26 // scale
    yield from one_dimensional(device, LARGEST // scale, peers)
    for width in (16, 32, 64, 128, 256, 512, 1024, 4096):
        rows = max(min(max(ROWS, 2**22 // width), 2**26 // width) // scale, 1)
        yield cases.row_pack(device, rows, width, 0.05, with_peers=peers)
        yield cases.row_pack(device, rows, width, 0.05, BF16)
        yield cases.row_unpack(device, rows, width, 0.05)
        for format in FORMATS:
            yield cases.row_quantize(device, rows, width, format)
            yield cases.row_dequantize(device, rows, width, format)
            if width in (64, 1024):  # one rank, because row_dequantize could be such a sum
                yield cases.row_dequantize_sum(device, rows, width, format, 1)
            yield cases.row_dequantize_sum(device, rows, width, format, 4)
    yield cases.row_pack(device, ROWS // scale, 256, 0.1)
    for numel in (2**24, BUCKET, 2**20):
        yield from one_dimensional(device, numel // scale, peers)
    for numel in (sweep, BUCKET // scale):
        yield cases.mask_pack(device, numel, 0.01, F32, BF16, ranges=cases.RANGES)
    for density in (NOTHING, 0.001, 0.1, EVERYTHING):
        yield cases.mask_pack(device, sweep, density, F32, F32)
    yield cases.mask_pack(device, sweep, 0.01, F32, F32, clustered=True)
    yield cases.mask_pack(device, sweep, 0.01, F32, F32, misaligned=True)


def bucket_sizes(device: str, scale: int) -> Iterator[Case]:
    """Cases of about 25 MiB, and cases of the part of a bucket that one of 64 ranks owns.

    At about 25 MiB, the last blocks of a grid may take as long as all other blocks.
    """
    for blocks in range(372, 429, 7):  # an H200 runs 396 blocks of scatter_unpack at a time
        numel = 2**14 * blocks // scale
        yield cases.mask_pack(device, numel, 0.01, F32, F32)
        yield cases.scatter_unpack(device, numel, 0.01, 2)
        yield cases.quantize_pack(device, numel, F32, "int4")
        yield cases.dequantize_sum(device, numel, "int4", 2)
    owned = BUCKET // 64 // scale
    yield cases.scatter_unpack(device, owned, 0.01, 64)
    for format in ("int4", "ternary"):
        yield cases.dequantize_sum(device, owned, format, 64)


def one_dimensional(device: str, numel: int, peers: bool) -> Iterator[Case]:
    for grad, values in GRADS:
        yield cases.mask_pack(device, numel, 0.01, grad, values, with_peers=peers)
    for most in (PICKS, cases.SAMPLES):
        yield cases.sample_threshold(device, numel, 0.01, most=most)
    for ranks in (2, 8, 64):
        yield cases.scatter_unpack(device, numel, 0.01, ranks)
    for format in QUANTIZED_CODES:
        for grad in (F32, BF16):
            yield cases.quantize_pack(device, numel, grad, format)
        for ranks in (2, 8):
            yield cases.dequantize_sum(device, numel, format, ranks)
    for changed in cases.CHANGED:
        yield cases.diff_pack(device, numel, changed, with_peers=peers)
        yield cases.patch_apply(device, numel, changed)
    yield cases.diff_pack(device, numel, 0.03, True)


def measure(case: Case, device: str, light: bool) -> Iterator[dict]:
    """Time direct calls. For small cases, also time replays of a CUDA graph."""
    for graphs in (False, True) if device == "cuda" and case.numel <= BUCKET else (False,):
        options = argparse.Namespace(device=device, rounds=ROUNDS, graphs=graphs)
        result = kernels.measure(case, options, light=light) | {"graphs": graphs}
        with contextlib.suppress(ImportError, RuntimeError, AssertionError):  # no NVML or GPU
            result["sm_mhz"] = torch.cuda.clock_rate()
        print(line(row(result)), "in a graph" if graphs else "", flush=True)
        yield result
        case.peers = {}


def targets_met(results: list[dict], ours: str = "cuda") -> Iterator[tuple[bool, str]]:
    """Yield (whether the target is met, measured value and target) for each measured target."""

    def ms(result: dict, *names: str) -> float:
        return min(result["ms"][name]["median"] for name in names if name in result["ms"])

    called = [r for r in results if not r["graphs"] and ours in r["ms"]]
    largest = {r["case"]: ms(r, ours) for r in called if r["numel"] == LARGEST}
    for result in called:
        op, case, numel = (result[key] for key in ("op", "case", "numel"))
        name, elapsed = f"{op} {numel:,}: {case}", ms(result, ours)
        copy = ms(result, COPY, COPY_KERNEL)
        for (of, words, size), least in OF_COPY.items():
            if op == of and case.endswith(words) and size in (None, numel):
                share = copy / elapsed
                yield share >= least, f"{name}: {share:.3f} of a copy's speed, target {least}"
        for peer, times in FASTER_THAN.items() if (op, numel) == ("mask_pack", LARGEST) else ():
            if peer in result["ms"]:
                ratio = ms(result, peer) / elapsed
                target = min(times, 0.9 * ms(result, peer) / copy)
                text = f"{name}: {ratio:.2f}x as fast as {peer}, target {target:.1f}x"
                yield ratio >= target, text
    sampled = largest.get(f"{cases.SAMPLES} samples")
    packed = largest.get("float32 grad, float32 values")
    if sampled and packed:
        share = sampled / packed
        yield share <= SAMPLING, f"sampling: {share:.3f} of mask_pack's time, target {SAMPLING}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=95, help="no case starts after this time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--light", action="store_true", help="without eager, Triton and peers")
    parser.add_argument("--sizes", action="store_true", help="nine bucket sizes, owners' parts")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes by this number")
    args = parser.parse_args()
    if args.device == "cuda":
        gpu_backends()
    torch.manual_seed(0)
    start, results, failures, note = time.monotonic(), [], [], ""
    content = {"torch": torch.__version__, "provenance": provenance.describe(), "results": results}
    print(HEADER)
    name = "sizes.json" if args.sizes else "time.json"
    scaled = (args.device, args.scale)
    for case in bucket_sizes(*scaled) if args.sizes else chosen(*scaled, not args.light):
        if time.monotonic() - start > args.seconds:
            note = f"; stopped after {args.seconds:.0f} s, the rest is not measured"
            break
        try:
            results += measure(case, args.device, args.light)
        except (RuntimeError, SystemExit) as error:  # wrong results, or out of memory
            failures.append(str(error).splitlines()[0])
            print(failures[-1], flush=True)
        files.write_json(args.out / name, content)
        del case  # free its buffers before the next case
    targets = sorted(targets_met(results), reverse=True)  # put unmet targets last
    print()
    for is_met, text in targets:
        print("met    " if is_met else "NOT met", text)
    met = sum(is_met for is_met, _ in targets)
    report(failures, f"{len(results)} results{note}; {met} of {len(targets)} targets met")


if __name__ == "__main__":
    raise SystemExit(exit_status("time_ops.py", main))
