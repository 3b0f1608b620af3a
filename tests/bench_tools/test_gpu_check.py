"""bench/gpu_check.sh and its programs, as far as they can be tried without a GPU."""

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import emulation.build
import pytest
import torch

from dct_bench.kernels import cases
from dct_bench.kernels.arguments import TIMED
from dct_kernels._schemas import OPS

GPU = Path(__file__).parents[2] / "bench" / "gpu"
CHECK = GPU.parent / "gpu_check.sh"


@pytest.fixture(scope="module")
def program():
    """A function that imports one of the programs; they take over a signal and the search path."""
    kept, path = signal.getsignal(signal.SIGINT), list(sys.path)
    sys.path[:0] = [str(GPU)]
    yield importlib.import_module
    signal.signal(signal.SIGINT, kept)
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent == GPU:
            del sys.modules[name]


def test_every_op_is_timed(program):
    bench = program("bench")
    made = list(bench.all_cases("cpu", 1 << 16))
    assert {case.op for case in made} == set(TIMED)
    (result,) = bench.measure(made[-1], "cpu")
    assert result["op"] == made[-1].op and result["ms"].keys() >= {"copy", "cpp"}


def test_every_stage_has_a_limit_and_a_program():
    text = CHECK.read_text()
    stages = text.partition("STAGES='\n")[2].partition("'\n")[0].splitlines()
    programs = {words[3] for words in map(str.split, stages) if words[2] == "python"}
    assert all(int(words[1]) > 0 for words in map(str.split, stages))
    assert {program for program in programs if not (GPU.parents[1] / program).exists()} == set()


# Instead of Python: what a stage runs is a word or two, and `build` does not end.
RUNNER = """#!/bin/sh
case $1 in
  bench/gpu/summary.py | bench/gpu/clocks.py) exec {python} "$@" ;;
  bench/gpu/build.py) echo compiling; sleep 60 ;;
  bench/gpu/targets.py) echo "| the targets |" ;;
  bench/gpu/environment.py) echo "| a table |" > "$2/variants.md"; echo a GPU ;;
  *) echo "$1" ;;
esac
"""

POLLED = """#!/bin/sh
echo $$ > {pid}
while sleep 0.02; do echo "$(date '+%Y/%m/%d %H:%M:%S.%3N'), 1980, 2619, 99, 310.5, 41"; done
"""


def test_it_ends_in_time_with_what_there_is(tmp_path):
    runner, polled = tmp_path / "python", tmp_path / "nvidia-smi"
    runner.write_text(RUNNER.format(python=sys.executable))
    polled.write_text(POLLED.format(pid=tmp_path / "pid"))
    runner.chmod(0o755)
    polled.chmod(0o755)
    environment = os.environ | {"PYTHON": str(runner), "LIMIT": "2", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [CHECK, tmp_path / "out"], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split(maxsplit=4) == ["environment", "passed", *lines[0].split()[2:4], "a GPU"]
    assert "build" in lines[1] and "FAILED" in lines[1] and "last: compiling" in lines[1]
    assert all("not begun" in line for line in lines[2:-4]) and lines[2].startswith("conformance")
    assert lines[-4:] == ["", "| a table |", "", "| the targets |"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.tgz"]
    with tarfile.open(tmp_path / "out" / "results.tgz") as kept:
        assert {"./summary.json", "./build.log", "./variants.md"} <= set(kept.getnames())
        stages = json.load(kept.extractfile("./summary.json"))
        clocks = json.load(kept.extractfile("./environment.json"))["clocks"]
    assert [stage["rc"] for stage in stages[:3]] == [0, 124, None]
    assert clocks.keys() <= {"environment", "build"}
    assert clocks["build"]["sm_mhz"] == {"least": 1980, "median": 1980, "most": 1980}
    assert not list(tmp_path.glob("tmp.*"))
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_clocks_of_a_stage(program):
    clocks = program("clocks")

    def line(second, sm, used):
        when = datetime.fromtimestamp(1000 + second).strftime("%Y/%m/%d %H:%M:%S.250")
        return f"{when}, {sm}, 2619, {used}, 310.25, 41"

    text = [line(0, 345, 0), line(5, 1980, 99), line(6, 1755, 99), line(7, 345, 3)]
    text += ["2026/11/22 15:2", line(8, "[N/A]", 99), "Failed to initialize NVML"]
    polled = list(clocks.samples("\n".join(text)))
    assert len(polled) == 4 and polled[1].time == 1005.25
    stages = [("a", 0, 999.0, 3.0), ("b", 124, 1004.0, 4.0), ("c", None, 1005.0, 1.0)]
    stages += [("d", 0, 1020.0, 5.0)]
    keys = ("stage", "rc", "start", "seconds")
    found = clocks.by_stage(polled, [dict(zip(keys, stage, strict=True)) for stage in stages])
    assert found.keys() == {"a", "b"}
    assert found["a"]["sm_mhz"]["median"] == 345 and found["a"]["samples"] == 1
    assert found["b"]["sm_mhz"] == {"least": 1755, "median": 1867.5, "most": 1980}
    assert program("targets").clock_of({"clocks": {"bench": found["b"]}}) == 1867.5e6
    assert program("targets").clock_of({"clocks": found}) is None


def result(op, case, numel, density=None, graphs=False, **us):
    ms = {name.replace("_", " "): {"median": 1e-3 * value} for name, value in us.items()}
    about = {"op": op, "case": case, "numel": numel, "density": density}
    return about | {"graphs": graphs, "ms": ms}


PACK, LARGEST = "float32 grad, float32 values", 2**28


def test_targets_go_by_what_the_gpu_allows(program, monkeypatch):
    targets, floors = program("targets"), program("floors")
    us = {"mask_pack": 900.0, "row_pack": 24.0}
    floor = lambda r, gpu, clock: 1e-3 * us[r["op"]] if r["op"] in us and gpu else None  # noqa: E731
    monkeypatch.setattr(floors, "floor_ms", floor)
    results = [
        result("mask_pack", PACK, LARGEST, 0.01, copy=1000, copy_kernel=990, cuda=1000, topk=7000),
        result("mask_pack", PACK, LARGEST, 0.001, copy=1000, cuda=1),  # another density: not asked
        result("mask_pack", PACK, 2**22, 0.01, True, copy=18, cuda=1010),
        result("scatter_unpack", "P=64", LARGEST, 0.01, copy=800, cuda=1000),
        result("row_pack", "[65536, 256], k=13", 2**24, 0.05, copy=20, cuda=26),
        result("sample_threshold", "65536 samples", LARGEST, 0.01, copy=5, cuda=31),
        result("row_unpack", "[65536, 256], k=13", 2**24, 0.05, copy=20, triton=19),
    ]
    known = {t.what: t for t in targets.targets(results, "NVIDIA H200", 1.98e9)}
    assert len(known) == 6
    pack = known[f"mask_pack 268,435,456 {PACK}"]
    assert pack.measured == pytest.approx(0.99) and pack.met  # of the faster copy
    faster = known[f"mask_pack 268,435,456 {PACK}, times faster than topk"]
    assert faster.asked == ">= 6.4" and faster.met  # 20 times would be below the floor
    assert known[f"mask_pack 4,194,304 {PACK}, in a graph"].measured == pytest.approx(900 / 1010)
    rows = known["row_pack [65536, 256], k=13"]
    assert rows.measured == pytest.approx(24 / 26) and rows.asked == ">= 0.9" and rows.met
    sampling = known["sample_threshold 268,435,456 65536 samples, of mask_pack's time"]
    assert sampling.measured == pytest.approx(0.031) and not sampling.met
    unknown = {t.what: t for t in targets.targets(results, None)}
    assert unknown["row_pack [65536, 256], k=13"].asked == ">= 0.7"
    assert unknown["scatter_unpack 268,435,456 P=64"].asked == ">= 0.75"
    table = targets.table(list(known.values()))
    assert [" NO " in line for line in table[2:]] == [False] * 4 + [True] * 2


def test_floors_are_launches_and_the_pipe_that_binds(program, monkeypatch):
    floors = program("floors")
    pack, h100 = result("mask_pack", PACK, LARGEST, 0.01), "NVIDIA H100 80GB HBM3"
    assert floors.floor_ms(pack, "A100") is None
    assert floors.floor_ms(pack | {"case": "of no case"}, h100) is None
    assert 0.05 < floors.floor_ms(pack, h100) < 1.0
    assert 5 < floors.instructions(pack) * 32 / LARGEST < 60

    def floor(slots, half_rate, **clock):
        cost = SimpleNamespace(op="", slots=slots, half_rate=half_rate, launches=3)
        monkeypatch.setattr(floors, "_cost", lambda result: cost)
        return floors.floor_ms(pack, "H200", **clock)

    launches, slot = 1e-3 * (5.0 + 2 * 2.4), 1e3 * LARGEST / (32 * 132 * 4 * 1.755e9)
    assert floor(20, 9) == pytest.approx(launches + 20 * slot)
    assert floor(20, 11) == pytest.approx(launches + 22 * slot)
    assert floor(20, 9, clock=1.755e9 / 2) == pytest.approx(launches + 40 * slot)


def test_every_op_has_been_counted(program):
    _, counted = program("floors").costs.load()
    assert {cost.op for cost in counted.values()} >= {*OPS, "r += g"}


BARRIER = "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
NCU = [
    ["ID", "Process ID", "Kernel Name", "launch__registers_per_thread", "gpu__time_duration.sum"],
    ["", "", "", "register/thread", "ns"],
    ["0", "1234", "void dct::cuda::<unnamed>::stage<float>(dct::Args)", "64", "700,500"],
    ["1", "1234", "void dct::cuda::<unnamed>::place<float, (int)2>(dct::Args)", "32", "9,000"],
]
NCU[0] += ["smsp__inst_executed.sum", "smsp__average_warp_latency_per_inst_issued.ratio", BARRIER]
NCU[1] += ["inst", "inst", "inst"]
NCU[2] += ["300", "20", "5"]
NCU[3] += ["100", "10", "n/a"]


def test_counters_are_read_and_joined(program):
    counters = program("counters")
    said = ["==PROF== Connected to process 1234 (/usr/bin/python3)"]
    said += ['"' + '","'.join(row) + '"' for row in NCU]
    rows = counters.read_ncu("\n".join([*said, "==PROF== Disconnected from process 1234"]))
    assert [row["gpu__time_duration.sum"] for row in rows] == [700500.0, 9000.0]
    of_us = "void dct::cuda::(anonymous namespace)::"
    work = [{"name": "Memset (Device)", "us": 1.5}]
    work += [{"name": f"{of_us}stage<float>(dct::Args)", "us": 690.0}]
    work += [{"name": f"{of_us}place<float, 2>(dct::Args)", "us": 8.0}]
    measured = [{"op": "mask_pack", "case": PACK, "instructions": 800.0, "work": work}]
    alone = counters.table(measured)
    counters.joined(measured, rows)
    lines = [
        dict(zip(counters.HEADER, line[2:-2].split(" | "), strict=True))
        for line in counters.table(measured)[2:]
    ]
    assert [line["kernel"] for line in lines] == [
        "Memset (Device)",
        "stage<float>",
        "place<float, 2>",
    ]
    assert [line["ncu, us"] for line in lines] == ["", "700.5", "9.0"]
    assert [line["barrier, %"] for line in lines] == ["", "25", ""]
    assert lines[0]["executed/counted"] == "0.50" and lines[1]["MB read"] == ""
    for kernel in work:
        kernel.pop("counters", None)
    counters.joined(measured, rows[::-1])  # of another program
    assert counters.table(measured) == alone


def test_times_of_kernels_are_medians_over_calls(program, monkeypatch):
    counters = program("counters")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    did = [[("a", 3.0), ("b", 9.0), ("b", 1.0)], [("a", 5.0), ("b", 2.0), ("a", 1.0), ("b", 6.0)]]
    monkeypatch.setattr(counters, "device_work", lambda run: run() and did.pop(0))
    called = []
    case = SimpleNamespace(sets=2, reset=lambda i: called.append("reset"))
    case.run = lambda ops, i: called.append(i)
    assert counters.times(case, None) == [("a", 3.0), ("b", 4.0)]  # of 5 and 1, of 2 and 4
    assert called == ["reset", "reset", 0, 1] * 2


def test_what_the_gpu_did_is_read_from_a_trace(program):
    events = [("kernel", "b", 20, 3.5), ("gpu_memset", "Memset (Device)", 10, 1.0)]
    events += [("gpu_user_annotation", "dct::pack", 5, 30.0), ("cpu_op", "dct::mask_pack", 1, 2.0)]
    keys = ("cat", "name", "ts", "dur")
    trace = {"traceEvents": [dict(zip(keys, e, strict=True)) for e in events] + [{"ph": "M"}]}
    assert program("common").work_in(trace) == [("Memset (Device)", 1.0), ("b", 3.5)]


def test_a_variant_is_files_and_definitions(program, tmp_path, monkeypatch):
    builds = program("variant_builds")
    folder = tmp_path / "variants" / "slow"
    (folder / "detail").mkdir(parents=True)
    text = (builds.CSRC / "cuda" / "row_pack.cu").read_text() + "int more = MORE;\n"
    (folder / "row_pack.cu").write_text(text)
    (folder / "detail" / "new.cuh").write_text("")
    (folder / builds.DEFINITIONS).write_text("# of what\none MORE=1\n\ntwo MORE=2 LESS\n")
    (tmp_path / "variants" / "nothing").mkdir()
    found = builds.variants(tmp_path / "variants")
    assert [variant.name for variant in found] == ["as_is", "nothing", "slow.one", "slow.two"]
    csrc = builds.sources(found[3], tmp_path / "csrc")
    assert (csrc / "cuda" / "row_pack.cu").read_text() == text
    assert (csrc / "cuda" / "detail" / "new.cuh").exists() and (csrc / "common" / "ops.h").exists()
    assert builds.changed(found[3], csrc) == ["row_pack"]
    assert builds.changed(found[1], builds.sources(found[1], tmp_path / "as_is")) == []
    monkeypatch.setattr(builds, "CSRC", csrc)
    assert builds.changed(builds.Variant("same"), csrc) == []
    assert builds.changed(builds.Variant("defined", None, ("MORE=3",)), csrc) == ["row_pack"]
    warp = csrc / "cuda" / "detail" / "warp.cuh"
    other = builds.sources(builds.Variant("of a header"), tmp_path / "other")
    (other / "cuda" / "detail" / "warp.cuh").write_text(warp.read_text() + "// more\n")
    assert {"mask_pack", "scatter_unpack"} <= set(builds.changed(found[1], other))
    assert builds.changed(found[2], other) == ["row_pack"]  # its folder says so
    words = builds.command(found[3], csrc, "row_pack", "9.0", tmp_path / "x.so")[1:]
    assert {"-arch=sm_90", "-DMORE=2", "-DLESS", "-fmad=false", f"-I{csrc}"} <= set(map(str, words))
    assert words[-4:] == [
        csrc / "cuda" / "row_pack.cu",
        builds.LAUNCHERS / "row_pack.cpp",
        "-o",
        tmp_path / "x.so",
    ]


@pytest.mark.large
def test_every_variant_builds(program, tmp_path, monkeypatch):
    builds = program("variant_builds")
    if builds.toolkit.nvcc() is None:
        pytest.skip("no nvcc (CUDA_HOME or PATH says where)")
    monkeypatch.setattr(builds, "BUILD", tmp_path)
    builds.build("9.0")
    made = {path.with_suffix("") for path in tmp_path.glob("*/*.so")}
    assert {path.with_suffix("") for path in tmp_path.glob("*/*.log")} == made
    names = {variant.name for variant in builds.variants()}
    assert {path.parent.name for path in made} == (names if len(names) > 1 else set())


def test_launchers_and_who_differs(program, monkeypatch):
    """The libraries' functions, of the kernels as the emulator runs them."""
    variants, launchers = program("variants"), program("variant_builds").LAUNCHERS
    stream = SimpleNamespace(cuda_stream=None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(cases, "COLD_BYTES", 1)
    monkeypatch.setattr(variants, "ROUNDS", 1)
    eager = cases.backends("cpu")["eager"]
    found = {}
    for op in variants.OPS:
        library = emulation.build.build(str(launchers / f"{op}.cpp"), [op], shared=True)
        ctypes.CDLL(str(library)).configure(ctypes.c_int64(1), ctypes.c_int64(3))
        wrong = SimpleNamespace(**vars(eager) | {op: lambda *a, op=op: spoilt(op, eager, *a)})
        found[op] = {"wrong": wrong, "as_is": variants.load(library, op)}
    made = list(variants.timed(set(variants.OPS), 1 << 14, "cpu"))
    assert {case.op for case, _ in made} == set(variants.OPS)
    for case, _ in made:
        result = variants.measure(case, found[case.op], False, "cpu")
        assert found[case.op].keys() == {"as_is"}, case
        head, _, line = variants.table([result], ["as_is", "wrong"])
        assert line.count("|") == head.count("|") and line.endswith(" |  |")
        share = result["ms"]["copy"]["median"] / result["ms"]["as_is"]["median"]
        assert f") {share:.3f} | " in line
    assert variants.measure(made[0][0], {}, False, "cpu") is None


def spoilt(op, eager, *arguments):
    results = getattr(eager, op)(*arguments)
    if op == "mask_pack":
        arguments[4][-1] = 1  # of the payload
    first = arguments[0] if op == "mask_pack" else arguments[1] if op == "scatter_unpack" else None
    (first if first is not None else results[0] if op == "row_pack" else results)[..., 0] += 1
    return results


def test_a_step_of_ops_and_its_table(program, monkeypatch):
    step = program("step")
    monkeypatch.setattr(step, "STEPS", 1)
    monkeypatch.setattr(step, "ROUNDS", 1)
    found = step.step_of_ops(50_000, 0.01, 8, "cpu")
    assert found["buckets"] == 1 and found["sent"] == pytest.approx(0.01, rel=0.25)
    assert found["state_bytes"] == 4 * 50_000 + 8 * (found["state_bytes"] - 200_000) // 8
    # A ring of 2 (P - 1) messages of n / P; a binary tree would take longer.
    bucket = step.links([step.BUCKET], [330_000], 2)["100"]
    assert bucket["bf16_all_reduce"] == pytest.approx(2 * (0.01 + step.BUCKET / 1e8))
    assert bucket["all_gather"] == pytest.approx(0.01 + 330_000 / 1e8)
    found |= {"launches": 112, "graph_ms": found["called_ms"], "peak_bytes": 2_000_000}
    times = {"median": 5.0, "q20": 4.0, "q80": 6.0}
    plain = {"task": "t", "hook": False, "backward_ms": times, "step_ms": times}
    hooked = plain | {"hook": True, "backward_ms": times | {"median": 5.75}, "launches": 9}
    table = step.tables([found], [plain, hooked])
    assert all(line.count("|") in (0, 12, 8) for line in table)
    assert table[2].startswith("| 1.0% | 8 | ") and " | 112 | " in table[2]
    assert " | 0.750 | " in table[-1] and " | with the hook | " in table[-1]
