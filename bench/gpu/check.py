#!/usr/bin/env python3
"""Build the extension, then test, time and profile it on a GPU, in less than ten minutes."""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LEAST_SECONDS = 2  # no stage starts with less time left


class Stage(NamedTuple):
    name: str
    expected: float  # seconds on an H200 with 16 cores, partly estimated
    limit: float  # seconds
    description: str
    command: tuple[str, ...]  # OUT: the results folder; PYTHON: the interpreter
    dry: tuple[str, ...] = ()  # options of a dry run


def program(name: str, *options: str) -> tuple[str, ...]:
    return "PYTHON", "-m", f"bench.gpu.{name}", "OUT", *options


def conformance(chosen: str, processes: int = 1, tests: str = "") -> tuple[str, ...]:
    """The command that runs the conformance tests matching `chosen`, without the PTX executor."""
    command = ("PYTHON", "-m", "pytest", f"tests/conformance{tests}", "-k", f"{chosen} and not ptx")
    if processes > 1 and importlib.util.find_spec("xdist"):
        command += ("-n", str(min(processes, len(os.sched_getaffinity(0)))))
    return (*command, "-p", "no:cacheprovider", "--durations", "3", "-rfE")


def sanitized(tool: str) -> tuple[str, ...]:
    """The command that runs a conformance test of all ops under compute-sanitizer."""
    command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20")
    return command + conformance("cuda and agree", tests="/test_determinism.py")


MASK_PACK, OTHER_OPS = (conformance(f"cuda and {ops}", 6) for ops in ("mask_pack", "not mask_pack"))
PATCHES = conformance("cuda and (diff_pack or patch)", 6)
COLLECT = ("-k", "ptx-cuda", "--collect-only", "-q")
SMALL = ("--device", "cpu", "--scale", "65536")
DRY_SLOWER = 20  # multiplies all time limits in a dry run, because a CPU is slower
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sectors_op_write.sum")
METRICS += ("smsp__inst_executed_pipe_alu.sum", "gpu__time_duration.sum")
COUNTERS = ("ncu", "--clock-control", "none", "--profile-from-start", "off")
for section in ("SpeedOfLight", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats"):
    COUNTERS += ("--section", section)
COUNTERS += ("--metrics", ",".join(METRICS))
COUNTERS += ("PYTHON", "-m", "bench.gpu.profile_ops")
TINY = ("--device", "cpu", "--tiny")
LIGHT = program("time_ops", "--light", "--seconds")
# The most important stages come first. The processes of a stage share the GPU. The processes of
# the stage "triton" spend most of their time compiling.
STAGES = (
    Stage("environment", 7, 20, "versions of software; the GPU's clocks", program("environment")),
    Stage("build", 30, 120, "the extension, and other methods' kernels", program("build")),
    Stage("mask_pack", 25, 50, "mask_pack in CUDA against the oracle", MASK_PACK, COLLECT),
    Stage("patches", 12, 40, "ops on weight patches against the oracle", PATCHES, COLLECT),
    Stage("ops", 90, 120, "all other ops against the oracle", OTHER_OPS),
    Stage("time", 95, 110, "times of ops, copies and other methods; targets", program("time_ops")),
    Stage("step", 75, 130, "ops of a step; DDP with and without hooks", program("step"), TINY),
    Stage("counters", 35, 60, "each kernel in ncu: time and counters", COUNTERS, SMALL),
    Stage("memcheck", 12, 25, "each op with compute-sanitizer's memcheck", sanitized("memcheck")),
    Stage("racecheck", 13, 25, "each op with its racecheck", sanitized("racecheck")),
    Stage("behavior", 40, 60, "CUDA graphs, streams, torch.compile, opcheck", program("behavior")),
    Stage("layer", 130, 190, "results of dct_parallel on GPU and CPU", program("layer")),
    Stage("devices", 5, 60, "ranks on two GPUs, if there are two", program("devices")),
    Stage("triton", 130, 150, "Triton's kernels against the oracle", conformance("triton", 12)),
    Stage("variants", 145, 170, "times of variants of kernels", program("variants"), SMALL),
    Stage("sizes", 40, 55, "ops on buckets of about 25 MiB", (*LIGHT, "45", "--sizes"), SMALL),
    Stage("light", 80, 95, "like time, without other methods", (*LIGHT, "85"), SMALL),
    Stage("large", 15, 30, "ops on more than 2^31 elements", program("large")),
)
NOT_BY_DEFAULT = ("patches", "variants", "sizes", "light")
# Sets of stages, for two calls on a machine that is lent for 15 minutes, and their time limits.
PLAN = ("environment", "build", "mask_pack", "variants", "counters", "sizes", "step", "light")
SETS = {"plan": PLAN, "layer": ("build", "patches", "layer", "devices", "memcheck", "racecheck")}
LIMITS = {"plan": 560, "layer": 300}

EPILOG = """\
stages in their order, with expected seconds and limits:
{stages}

OUT is created if it does not exist. It will contain
  summary.json   status, seconds and last line of each stage
  STAGE.log      the output of a stage; time.log ends with the targets
  STAGE.json     the results of time, step, variants and sizes (of light: time.json)
All files are written while the stages run, so an interrupted run keeps its results.

If a stage fails or is stopped at its limit, the other stages run. The exit status is the
number of failed and stopped stages. A stage is skipped if its tool is missing or no time is left.

Needs torch >= 2.11 with CUDA, nvcc, numpy, rich, pytest and hypothesis. Uses pytest-xdist, Triton,
ncu and compute-sanitizer if they are installed. Installs nothing, changes no setting of the GPU.

By default, all stages except patches, variants, sizes and light run. Two sets of stages, with the
expected seconds of each set:
{sets}

examples:
  python bench/gpu/check.py out
  python bench/gpu/check.py out --stages plan --archive out.tgz
  python bench/gpu/check.py out --stages build,mask_pack,time      after changing mask_pack
"""


def environment() -> dict[str, str]:
    """Environment variables that select this checkout's packages and tests, and CUDA's tools."""
    variables = dict(os.environ)
    modules = [
        str(ROOT),
        str(ROOT / "python"),
        str(ROOT / "tests"),
        str(ROOT / "tools"),
        variables.get("PYTHONPATH", ""),
    ]
    tools = [str(Path(sys.executable).parent), variables["PATH"], "/usr/local/cuda/bin"]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, modules))
    variables["PATH"] = os.pathsep.join(tools)
    variables["PYTHONUNBUFFERED"] = "1"
    return variables


def dry(stage: Stage) -> Stage:
    """The stage as it runs on a machine without a GPU and without CUDA's tools."""
    command = stage.command[stage.command.index("PYTHON") :]
    if command[2] == "pytest":
        command += COLLECT
    elif stage.dry:
        command += stage.dry
    else:
        command = ("PYTHON", "-c", f"import {command[2]}")
    return stage._replace(command=command, limit=DRY_SLOWER * stage.limit)


def run_stage(stage: Stage, out: Path, limit: float) -> dict[str, object]:
    """Run a stage and return its entry of the summary."""
    variables, log, start = environment(), out / f"{stage.name}.log", time.monotonic()
    values = {"OUT": str(out), "PYTHON": sys.executable}
    command = [values.get(word, word) for word in stage.command]
    if shutil.which(command[0], path=variables["PATH"]) is None:
        return result(stage, "skipped", 0.0, f"{command[0]} is not installed")
    if command[0] == "compute-sanitizer":  # one allocation per tensor, to find overruns
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with log.open("w") as file:
        options = {"cwd": ROOT, "env": variables, "stdin": subprocess.DEVNULL, "stdout": file}
        options |= {"stderr": subprocess.STDOUT, "start_new_session": True}  # a process group
        process = subprocess.Popen(command, **options)
        try:
            status = "failed" if process.wait(limit) else "passed"
            message = last_line(log)
        except subprocess.TimeoutExpired:
            status, message = "stopped", f"after {limit:.0f} s, at: {last_line(log)}"
        finally:
            end(process)
    return result(stage, status, time.monotonic() - start, message)


def result(stage: Stage, status: str, seconds: float, message: str) -> dict[str, object]:
    found = {"stage": stage.name, "status": status, "seconds": round(seconds, 1)}
    return found | {"message": message}


def end(process: subprocess.Popen) -> None:
    """Interrupt, then kill the process group. An interrupted pytest reports earlier failures."""
    for stop in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, stop)
            process.wait(5)


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line[:200] for line in reversed(lines) if line), "nothing was printed")


def run(stages: Sequence[Stage], out: Path, limit: float, archive: Path | None = None) -> int:
    """Run the stages and return the number of failures.

    Writes the summary after each stage, and all files of `out` to `archive`.
    """
    out.mkdir(parents=True, exist_ok=True)
    start, results = time.monotonic(), []
    for stage in stages:
        left = limit - (time.monotonic() - start)
        if left < LEAST_SECONDS:
            results.append(result(stage, "skipped", 0.0, "no time left"))
        else:
            print(f"{stage.name} ...", file=sys.stderr, flush=True)
            results.append(run_stage(stage, out, min(stage.limit, left)))
        (out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")
        if archive is not None:
            with tarfile.open(archive, "w:gz") as file:
                file.add(out, out.name)
    for found in results:
        print("{stage:12} {status:8} {seconds:6.1f} s  {message}".format(**found))
    return sum(found["status"] in ("failed", "stopped") for found in results)


def main() -> None:
    by_name = {stage.name: stage for stage in STAGES}
    names = list(by_name)
    usual = ",".join(name for name in names if name not in NOT_BY_DEFAULT)
    stages = [f"  {s.name:12} {s.expected:4} {s.limit:4} {s.description}" for s in STAGES]
    sets = [
        f"  {name}: {sum(by_name[part].expected for part in parts)} s: {', '.join(parts)}"
        for name, parts in SETS.items()
    ]
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=EPILOG.format(stages="\n".join(stages), sets="\n".join(sets)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the results")
    which = "stages or set of stages to run"
    parser.add_argument("--stages", metavar="A,B", default=usual, help=which)
    limit = "seconds after which the current stage is stopped and no other starts (default: 560; "
    parser.add_argument("--limit", type=float, metavar="S", help=f"{limit}for layer 300)")
    archive = "also write all results to this .tgz, after each stage"
    parser.add_argument("--archive", type=Path, metavar="FILE", help=archive)
    parser.add_argument("--dry-run", action="store_true", help="test the commands without a GPU")
    args = parser.parse_args()
    wanted = SETS.get(args.stages, args.stages.split(","))
    if unknown := set(wanted) - set(names):
        parser.error(f"--stages must be stages of --help, got {','.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also stops the current stage
    order, limit = wanted if args.stages in SETS else names, LIMITS.get(args.stages, 560)
    chosen = [by_name[name] for name in order if name in wanted]
    if args.dry_run:
        chosen, limit = [dry(stage) for stage in chosen], DRY_SLOWER * limit
    try:
        failed = run(chosen, args.out.resolve(), args.limit or limit, args.archive)
    except KeyboardInterrupt:
        sys.exit("interrupted: summary.json contains the finished stages")
    sys.exit(failed)


if __name__ == "__main__":
    main()
