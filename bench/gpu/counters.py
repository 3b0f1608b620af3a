"""What the kernels do, by the GPU's own counters: counters.json and counters.md.

    python bench/gpu/counters.py OUT [--seconds 45]

Times of every kernel by itself are torch.profiler's, medians of a few calls on buffers of their
own. The rest is Nsight Compute's (ncu), of one call, at the clocks that the GPU has; without it the
times stand alone. The instructions that it counts stand beside those that tests/ptx counts in
machine code.
"""

import argparse
import csv
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import floors
import torch
from common import BF16, F32, device_work, gpu_backends, report

from dct_bench.kernels import cases
from dct_bench.kernels.cases import Case

NUMEL, ROWS = 2**26, 65536
ROUNDS, MOST_SETS = 2, 4
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
SECTIONS += ("InstructionStats", "Occupancy", "LaunchStats")
BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# {column: (what ncu calls it, factor, format)}
COLUMNS = {
    "ncu, us": ("gpu__time_duration.sum", 1e-3, ".1f"),
    "SM, MHz": ("gpc__cycles_elapsed.avg.per_second", 1e-6, ".0f"),
    "DRAM, %": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1, ".0f"),
    "MB read": (BYTES[0], 1e-6, ".1f"),
    "MB written": (BYTES[1], 1e-6, ".1f"),
    "issue, %": ("smsp__issue_active.avg.per_cycle_active", 100, ".0f"),
    "ALU, %": ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active", 1, ".0f"),
    "occupancy, %": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1, ".0f"),
    "registers": ("launch__registers_per_thread", 1, ".0f"),
}
EXECUTED = "smsp__inst_executed.sum"
LATENCY = "smsp__average_warp_latency_per_inst_issued.ratio"  # of which stalls are shares


def all_cases(device: str, scale: int = 1) -> Iterator[Case]:
    numel, rows = NUMEL // scale, ROWS // scale
    for grad, values in ((F32, F32), (BF16, BF16), (None, F32)):
        yield cases.mask_pack(device, numel, 0.01, grad, values, False)
    yield cases.scatter_unpack(device, numel, 0.01, 8)
    yield cases.sample_threshold(device, numel, 0.01)
    yield cases.row_pack(device, rows, 1024, 0.05, False)
    yield cases.row_pack(device, rows, 256, 0.05, False, BF16)
    yield cases.row_unpack(device, rows, 256, 0.05, False)
    yield cases.row_quantize(device, rows, 256, "ternary", False)
    yield cases.row_dequantize(device, rows, 256, "ternary", False)


def short(kernel: str) -> str:
    """`name<arguments>` of what a profiler calls a kernel."""
    if not is_kernel(kernel):
        return kernel
    plain = re.sub(r"\((anonymous namespace|int|bool|unsigned int|long)\)(::)?", "", kernel)
    plain = re.sub(r"<unnamed>::|\bdct::(cuda::)?", "", plain.removeprefix("void "))
    return plain.partition("(")[0]


def is_kernel(name: str) -> bool:
    return not name.startswith(("Memset", "Memcpy"))


def times(case: Case, ops) -> list[tuple[str, float]]:
    """(name, median microseconds) of what a call has the GPU do, in order."""
    sets, calls = min(case.sets, MOST_SETS), []
    for _ in range(ROUNDS):
        for i in range(sets):
            case.reset(i)
        torch.cuda.synchronize()
        work = device_work(lambda: [case.run(ops, i) for i in range(sets)])
        each = len(work) // sets
        calls += [work[i * each : (i + 1) * each] for i in range(sets)]
    names = [tuple(name for name, _ in call) for call in calls]
    usual = statistics.mode(names)  # the profiler may miss an event
    alike = [call for call, its_own in zip(calls, names, strict=True) if its_own == usual]
    return [
        (of_one[0][0], statistics.median(us for _, us in of_one))
        for of_one in zip(*alike, strict=True)
    ]


def read_ncu(text: str) -> list[dict[str, str | float]]:
    """{metric: value} of every kernel, in order, of the page `raw` as CSV; numbers as such."""
    # Other lines are said by ncu itself, or by the program. The first row holds units.
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return [
        {name: _number(value) for name, value in row.items()}
        for row in csv.DictReader(lines)
        if row["ID"]
    ]


def _number(text: str) -> str | float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


def ncu() -> str | None:
    """Where it is: on PATH, in the toolkit, or beside it."""
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    places = [shutil.which("ncu"), home / "bin" / "ncu"]
    places += sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    return next((str(place) for place in places if place and Path(place).exists()), None)


def watch(out: Path, seconds: float) -> list[dict[str, str | float]]:
    """What ncu counts of all cases; raises RuntimeError where it cannot."""
    tool, log = ncu(), out / "ncu.csv"
    if tool is None:
        raise RuntimeError("ncu is not there")
    command = [tool, "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--target-processes", "all", "--csv", "--page", "raw", "--print-units", "base"]
    command += [word for section in SECTIONS for word in ("--section", section)]
    command += ["--metrics", ",".join(BYTES), "--log-file", str(log)]
    command += [sys.executable, __file__, str(out), "--watched", "--seconds", str(seconds)]
    running = subprocess.Popen(command)
    try:
        status = running.wait(timeout=max(seconds, 0) + 5)  # the program ends by itself before
    except subprocess.TimeoutExpired:
        running.kill()
        status = running.wait()
    rows = read_ncu(log.read_text(errors="replace")) if log.exists() else []
    if status or not rows:
        said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        raise RuntimeError(f"ncu ended with {status}: {said[-1] if said else 'nothing was said'}")
    return rows


def watched(seconds: float) -> None:
    """What ncu watches: one call of every case, and nothing else. It is ended after so long."""
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0))
    ops = gpu_backends()["cuda"]
    torch.manual_seed(0)
    for case in all_cases("cuda"):
        case.run(ops, 0)  # loads the module
        case.reset(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        case.run(ops, 0)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def joined(measured: list[dict], counted: list[dict[str, str | float]]) -> None:
    """Give every kernel its counters: both are in the order of launches, or nothing is given."""
    kernels = [work for case in measured for work in case["work"] if is_kernel(work["name"])]
    launched = [short(work["name"]).partition("<")[0] for work in kernels]
    watched = [short(str(row["Kernel Name"])).partition("<")[0] for row in counted]
    if launched != watched:
        print(f"not joined: {launched} were launched, {watched} counted", flush=True)
        return
    for kernel, counters in zip(kernels, counted, strict=True):
        kernel["counters"] = counters


HEADER = ("case", "kernel", "us", *COLUMNS, "barrier, %", "long scoreboard, %", "executed/counted")


def table(measured: list[dict]) -> list[str]:
    """A line a kernel. Stalls are shares of a warp's time; `counted` is of the whole call."""
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    for case in measured:
        executed = sum(work.get("counters", {}).get(EXECUTED, 0.0) for work in case["work"])
        for number, work in enumerate(case["work"]):
            counters = work.get("counters", {})
            label = f"{case['op']} {case['case']}" if number == 0 else ""
            cells = [label, short(work["name"]), f"{work['us']:.1f}"]
            for name, factor, form in COLUMNS.values():
                cells.append(_cell(counters.get(name), factor, form))
            latency = counters.get(LATENCY)
            for reason in ("barrier", "long_scoreboard"):
                factor = 100 / latency if isinstance(latency, float) and latency else 0
                cells.append(_cell(counters.get(_STALLED.format(reason)), factor, ".0f"))
            known = number == 0 and executed and case["instructions"]
            cells.append(f"{executed / case['instructions']:.2f}" if known else "")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(value: str | float | None, factor: float, form: str) -> str:
    return format(value * factor, form) if isinstance(value, float) else ""


def measure(out: Path, seconds: float) -> tuple[int, str]:
    """(kernels, what came of their counters); writes what there is after each part."""
    start, ops, measured = time.monotonic(), gpu_backends()["cuda"], []

    def write() -> None:
        (out / "counters.json").write_text(json.dumps(measured, indent=1))
        (out / "counters.md").write_text("\n".join(table(measured)) + "\n")

    torch.manual_seed(0)
    device_work(lambda: torch.zeros(1, device="cuda"))  # loads the profiler
    for case in all_cases("cuda"):
        case.run(ops, 0)
        about = {"op": case.op, "case": case.detail, "numel": case.numel, "density": case.density}
        work = [{"name": name, "us": us} for name, us in times(case, ops)]
        counted = floors.instructions(about)
        measured.append(about | {"bytes": case.nbytes, "instructions": counted, "work": work})
        del case
    write()
    torch.cuda.empty_cache()
    kernels = sum(is_kernel(work["name"]) for case in measured for work in case["work"])
    try:
        joined(measured, watch(out, seconds - (time.monotonic() - start)))
    except RuntimeError as error:
        return kernels, f"times alone: {error}"
    write()
    return kernels, "times and counters"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=45, help="end ncu after so long")
    parser.add_argument("--watched", action="store_true", help="as ncu starts it")
    args = parser.parse_args()
    if args.watched:
        watched(args.seconds)
    else:
        kernels, counters = measure(args.out, args.seconds)
        report(
            [] if kernels else ["torch.profiler saw no kernel"], f"{kernels} kernels; {counters}"
        )


if __name__ == "__main__":
    main()
