"""Finds the fastest variants of kernels on a GPU, by timing them in turns on the same buffers.

A variant is a copy of the sources with some text replaced. A variant is timed only if its results
are bitwise equal to the results of the unchanged sources. variants.json is written after each case.
Without a GPU (--device cpu), the PTX executor runs the kernels, and the times are meaningless.
"""

import argparse
import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from ptx import backend, build, toolkit

from bench import files, provenance
from bench.cli import exit_status
from bench.gpu.common import BF16, BUCKET, F32, report
from bench.microbench import cases
from bench.microbench.cases import Case
from bench.microbench.command import results
from bench.microbench.timing import take_turns
from dct_kernels import payload_layout

DEFAULT = "default"
# Calls both ops in sequence, as the hook does.
SAMPLED = "sample_threshold, mask_pack"
ROUNDS = 5


class Variant(NamedTuple):
    ops: tuple[str, ...]
    patches: tuple[tuple[str, str, str], ...]  # (pattern of file names, old text, new text)


def policy(load: str, store: str) -> Variant:
    """Other cache operators; see https://docs.nvidia.com/cuda/parallel-thread-execution."""
    ops = ("mask_pack", "quantize_pack", "dequantize_sum")
    return Variant(ops, (("**/*.cu*", "__ldcs(", load), ("**/*.cu*", "__stcs(", store)))


# Launches mask_pack's first kernel with programmatic dependent launch, so that its blocks start and
# prefetch while the previous kernel (sample_threshold) runs. This is not safe if another kernel
# precedes mask_pack, because that kernel could write the gradient. Waiting blocks hold registers
# that the backward pass needs, so only step.py can show whether it is faster.
_DEPENDENT_LAUNCH = """
template <typename... Parameters, typename... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t,
                             cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}
"""
_KEYS = "  uint32_t keys[kKeys] = {};\n"
_CLEARED = "  if (thread_index() == 0) block_sum = 0;\n"
_THRESHOLD = "threshold_of(args, tile.range);\n"
_DEVICE = "inline int device_attribute("

VARIANTS = {
    "plain": policy("__ldca(", "__stwb("),
    "load past L1": policy("__ldcg(", "__stwb("),
    "load .cs": policy("__ldcs(", "__stwb("),
    "store .cs": policy("__ldca(", "__stcs("),
    "blocks of 4096": Variant(
        ("scatter_unpack",),
        (("**/scatter_unpack.cu", "Whole = BlockShape<8, 1, 3>;", "Whole = BlockShape<4, 4, 8>;"),),
    ),
    "always halves": Variant(
        ("scatter_unpack",),
        (("**/scatter_unpack.cu", "2 * blocks.total <= multiprocessors()", "true"),),
    ),
    "always split": Variant(
        ("dequantize_sum",),
        (("**/dequantize_sum.cu", "blocks.total < 2 * multiprocessors()", "true"),),
    ),
    "hidden sampling": Variant(
        (SAMPLED,),
        (
            ("**/device.cuh", _DEVICE, _DEPENDENT_LAUNCH + _DEVICE),
            (
                "**/sample_threshold.cu",
                _KEYS,
                _KEYS + '  asm("griddepcontrol.launch_dependents;");\n',
            ),
            ("**/mask_pack.cu", "launch(mask_pack_stage", "launch_dependent(mask_pack_stage"),
            ("**/mask_pack.cu", f"  const float threshold = {_THRESHOLD}", ""),
            ("**/mask_pack.cu", "threshold, begin, length, slot}", "0, begin, length, slot}"),
            (
                "**/mask_pack.cu",
                _CLEARED,
                f'{_CLEARED}  asm volatile("griddepcontrol.wait;" ::: "memory");\n'
                f"  stager.threshold = {_THRESHOLD}",
            ),
        ),
    ),
}


class Library:
    """The launchers in a library, called on a GPU."""

    device = "cuda"

    def __init__(self, path: Path, scratch: torch.Tensor) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.give_scratch(ctypes.c_void_p(scratch.data_ptr()))

    def call(self, op: str, *arguments) -> None:
        self._library.give_stream(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        fields = b"".join(bytes(backend.to_c(argument)) for argument in arguments)
        if error := getattr(self._library, op)(fields):
            raise RuntimeError(f"{op} returned cudaError_t {error}")


def patched(sources: Path, variant: Variant, folder: Path) -> Path:
    """Copy the sources and apply all patches. Raise an error if the old text is not found."""
    shutil.copytree(sources, folder)
    for where, old, new in variant.patches:
        found = [path for path in folder.glob(where) if old in path.read_text()]
        if not found:
            raise ValueError(f"patch must replace a text of {where}, got {old!r}")
        for path in found:
            path.write_text(path.read_text().replace(old, new))
    return folder


def library(name: str, op: str, gpu: int | None = None) -> Path:
    """Build the op's launcher for the GPU architecture `gpu`, or for the PTX executor if None."""
    if name == DEFAULT:
        return build.build(gpu=gpu)
    with tempfile.TemporaryDirectory() as folder:
        sources = patched(toolkit.CSRC, VARIANTS[name], Path(folder, "csrc"))
        return build.build(sources, op.split(", "), gpu)


def ops_of(op: str, path: Path, scratch: torch.Tensor) -> SimpleNamespace:
    """The op as a case calls it."""
    called = Library(path, scratch) if scratch.is_cuda else backend.Executor(path)

    def run(op, *arguments):
        with backend.use_library(called):
            return getattr(backend, op)(*arguments)

    return SimpleNamespace(**{name: partial(run, name) for name in op.split(", ")})


def chosen(op: str, device: str, scale: int) -> Iterator[Case]:
    for numel in (size // scale for size in (2**28, 2**24, BUCKET, 2**20)):
        if op == "mask_pack":
            yield cases.mask_pack(device, numel, 0.01, F32, F32)
            yield cases.mask_pack(device, numel, 0.01, F32, BF16)
        elif op == "quantize_pack":
            yield cases.quantize_pack(device, numel, F32, "float32")
        elif op == "dequantize_sum":
            yield cases.dequantize_sum(device, numel, "float32", 8)
            yield cases.dequantize_sum(device, numel, "int4", 2)
        elif op == "scatter_unpack":
            yield from (cases.scatter_unpack(device, numel, 0.01, ranks) for ranks in (2, 64))
        else:
            yield sampled_case(device, numel)


def sampled_case(device: str, numel: int) -> Case:
    sets = max(2, min(64, cases.COLD_BYTES // (12 * numel)))
    capacity = max(1, numel // 80)
    grad = [torch.randn(numel, device=device) for _ in range(sets)]
    residual = [torch.zeros_like(tensor) for tensor in grad]
    nbytes = payload_layout(numel, capacity, BF16).nbytes
    payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    seen = torch.zeros(1, dtype=torch.int32, device=device)

    def run(ops, i):
        tau = ops.sample_threshold(grad[i], residual[i], 0.01, 1, 4096, i)
        ops.mask_pack(residual[i], grad[i], tau, payload, seen, capacity, BF16)
        return tau, residual[i], payload, seen

    detail = "float32 grad, bfloat16 values"
    return Case(SAMPLED, detail, numel, 12 * numel, sets, run, reset=lambda i: residual[i].zero_())


def compared(case: Case, ops: dict[str, SimpleNamespace], device: str) -> dict:
    """Time the variants with the same results as the default. Return the names of the others."""
    expected, calls, wrong = results(case, ops[DEFAULT]), {}, []
    for name, variant in ops.items():
        pairs = zip(results(case, variant), expected, strict=True)
        if all(torch.equal(a.view(torch.uint8), e.view(torch.uint8)) for a, e in pairs):
            calls[name] = lambda i, variant=variant: case.run(variant, i)
        else:
            wrong.append(name)
    sets, rounds = dict.fromkeys(calls, case.sets), dict.fromkeys(calls, ROUNDS)
    ms = take_turns(calls, case.reset, sets, rounds, device)
    return {"op": case.op, "case": case.detail, "numel": case.numel, "ms": ms, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes by this number")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    gpu = int("{}{}".format(*torch.cuda.get_device_capability())) if cuda else None
    args.out.mkdir(parents=True, exist_ok=True)
    scratch = torch.empty(2**29 if cuda else 0, device=args.device)
    pairs = [(name, op) for name, variant in VARIANTS.items() for op in variant.ops]
    pairs = [*((DEFAULT, op) for op in dict.fromkeys(op for _, op in pairs)), *pairs]
    build.build(gpu=gpu)  # first build the parts that all libraries share
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = dict(zip(pairs, pool.map(lambda pair: library(*pair, gpu), pairs), strict=True))
    content = {"provenance": provenance.describe(), "results": (found := [])}
    for op in dict.fromkeys(op for _, op in pairs):
        ops = {name: ops_of(op, path, scratch) for (name, of), path in made.items() if of == op}
        for case in chosen(op, args.device, args.scale):
            found.append(compared(case, ops, args.device))
            shown = {name: f"{1e3 * ms['median']:.1f}" for name, ms in found[-1]["ms"].items()}
            print(op, case.detail, f"{case.numel:,}", "us:", shown, flush=True)
            files.write_json(args.out / "variants.json", content)
            del case
    failures = [f"{f['op']} {f['numel']}: {', '.join(f['wrong'])}" for f in found if f["wrong"]]
    report(failures, f"{len(found)} cases of {len(VARIANTS)} variants, all bitwise equal")


if __name__ == "__main__":
    raise SystemExit(exit_status("variants.py", main))
