"""Builds the executor with g++, and the launchers and their PTX with nvcc."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from . import cache, toolkit

HERE = Path(__file__).resolve().parent
CUDART = HERE / "cudart.cpp"
LAUNCHERS = HERE / "module.cpp"

_FLAGS = ["-std=c++20", "-O2", "-ftree-vectorize", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror"]
# PTX rounds products and sums separately, and its integers wrap.
_FLAGS += ["-ffp-contract=off", "-fwrapv"]


def missing() -> str | None:
    """The missing requirement of the launchers, or None."""
    return "nvcc (set CUDA_HOME or PATH)" if toolkit.nvcc() is None else None


def build(patched: Path | None = None, ops: Sequence[str] = (), gpu: int | None = None) -> Path:
    """Build the executor and, if nvcc is found, the launchers and kernels of all ops.

    The kernels of `ops` are built from `patched`, a copy of csrc. With `gpu`, an architecture such
    as 90, the launchers and kernels are built for this GPU, and the executor is not built.
    """
    own_headers = cache.contents(HERE.glob("*.h"))
    gxx = ["g++", *_FLAGS, "-c"]
    compiles = []
    if gpu is None:
        sources = sorted(set(HERE.glob("*.cpp")) - {CUDART, LAUNCHERS})
        compiles = [(gxx, source, own_headers) for source in sources]
    if missing() is None:
        compiles += _launchers(gxx, own_headers, patched, ops, gpu)

    # Variants are built without the lock, because the files that they share have been built before.
    with contextlib.nullcontext() if patched else cache.alone():
        objects, running = [], []
        for command, source, headers in compiles:
            text = headers + source.read_bytes()
            built, process = cache.start([*command, source], text, source.stem + ".o")
            objects.append(built)
            running.append(process)
        for process in running:
            cache.finish(process)
        # With -Bsymbolic, launchers use the executor's cudaMalloc even if torch loads another.
        linker = ["g++", "-Wl,-Bsymbolic"] if gpu is None else [toolkit.nvcc()]
        built, process = cache.start([*linker, "-shared", *objects], b"", "ptx.so")
        cache.finish(process)
    return built


def _launchers(
    gxx, own_headers: bytes, patched: Path | None, ops: Sequence[str], gpu: int | None
) -> list:
    """[(command, source, contents of the headers)] for the launchers and their kernels."""
    gxx = [*gxx, f"-I{toolkit.CSRC}", "-isystem", toolkit.nvcc().parents[1] / "include"]
    nvcc = [toolkit.nvcc(), *toolkit.flags(), "-Xcompiler=-fPIC", "-c"]
    nvcc += ["-arch=compute_90", "-no-compress"] if gpu is None else [f"-arch=sm_{gpu}"]
    folders = {path.name: patched if path.stem in ops else toolkit.CSRC for path in toolkit.KERNELS}
    kernels = [
        (nvcc, folder / "cuda" / name, toolkit.headers(folder)) for name, folder in folders.items()
    ]
    runtime = [(gxx, CUDART, own_headers)] if gpu is None else []
    return [*runtime, (gxx, LAUNCHERS, toolkit.headers()), *kernels]
