"""Builds libraries of the executor, by g++, with the launchers and their PTX, by nvcc."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from dct_kernels._ops import OPS

from . import cache, toolkit

HERE = Path(__file__).resolve().parent
CUDART = HERE / "cudart.cpp"
LAUNCHERS = HERE / "module.cpp"

_FLAGS = ["-std=c++20", "-O2", "-ftree-vectorize", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror"]
# As in PTX, what is rounded twice is rounded twice, and integers wrap.
_FLAGS += ["-ffp-contract=off", "-fwrapv"]


def missing() -> str | None:
    """What launchers need and is not there, or None."""
    return "nvcc (CUDA_HOME or PATH says where)" if toolkit.nvcc() is None else None


def build(patched: Path | None = None, ops: Sequence[str] = (), gpu: int | None = None) -> Path:
    """Builds the executor and, if nvcc is found, the launchers and kernels of all ops.

    The kernels of `ops` are those of `patched`, a copy of csrc. With `gpu`, an architecture such as
    90, the launchers and kernels are built for that GPU, without the executor.
    """
    own = cache.contents(HERE.glob("*.h"))
    gxx = ["g++", *_FLAGS, "-c"]
    compiles = []
    if gpu is None:
        sources = sorted(set(HERE.glob("*.cpp")) - {CUDART, LAUNCHERS})
        compiles = [(gxx, source, own) for source in sources]
    if missing() is None:
        compiles += _launchers(gxx, own, patched, ops, gpu)

    # Several variants may be built at once: what they share must have been built before.
    with contextlib.nullcontext() if patched else cache.alone():
        objects, running = [], []
        for command, source, headers in compiles:
            text = headers + source.read_bytes()
            built, process = cache.start([*command, source], text, source.stem + ".o")
            objects.append(built)
            running.append(process)
        for process in running:
            cache.finish(process)
        # -Bsymbolic: the executor's cudaMalloc, even where torch has brought the real one.
        linker = ["g++", "-Wl,-Bsymbolic"] if gpu is None else [toolkit.nvcc()]
        built, process = cache.start([*linker, "-shared", *objects], b"", "ptx.so")
        cache.finish(process)
    return built


def _launchers(gxx, own: bytes, patched: Path | None, ops: Sequence[str], gpu: int | None) -> list:
    """(command, source, contents of its headers) of all that nvcc's kernels need."""
    gxx = [*gxx, f"-I{toolkit.CSRC}", "-isystem", toolkit.nvcc().parents[1] / "include"]
    nvcc = [toolkit.nvcc(), *toolkit.flags(), "-Xcompiler=-fPIC", "-c"]
    nvcc += ["-arch=compute_90", "-no-compress"] if gpu is None else [f"-arch=sm_{gpu}"]
    folders = {op: patched if op in ops else toolkit.CSRC for op in OPS}
    kernels = [
        (nvcc, folder / "cuda" / f"{op}.cu", toolkit.headers(folder))
        for op, folder in folders.items()
    ]
    runtime = [(gxx, CUDART, own)] if gpu is None else []
    return [*runtime, (gxx, LAUNCHERS, toolkit.headers()), *kernels]
