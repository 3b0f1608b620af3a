"""Builds libraries of the executor, by g++, with the launchers and their PTX, by nvcc."""

from pathlib import Path

import builds
from static import toolkit

from dct_kernels._schemas import OPS

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
CACHE = HERE.parents[1] / "build" / "ptx"
CUDART = HERE / "cudart.cpp"
LAUNCHERS = HERE / "module.cpp"

_FLAGS = ["-std=c++17", "-O2", "-ftree-vectorize", "-g1", "-fPIC"]
# -ffp-contract=off: what is rounded twice in PTX is rounded twice here.
_FLAGS += ["-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]


def missing() -> str | None:
    """What launchers need and is not there, or None."""
    return "nvcc (CUDA_HOME or PATH says where)" if toolkit.nvcc() is None else None


def build(mutated: dict[str, Path] | None = None) -> Path:
    """The library of the executor and, where there is nvcc, of all ops' launchers and kernels;
    those of `mutated` from another csrc."""
    own = builds.contents(HERE.glob("*.h"))
    gxx = ["g++", *_FLAGS, "-c"]
    sources = sorted(set(HERE.glob("*.cpp")) - {CUDART, LAUNCHERS})
    compiles = [(gxx, source, own) for source in sources]
    if missing() is None:
        compiles += _launchers(gxx, own, mutated or {})

    with builds.alone(CACHE):
        objects, running = [], []
        for command, source, headers in compiles:
            text = headers + source.read_bytes()
            built, process = builds.start([*command, source], text, CACHE, source.stem + ".o")
            objects.append(built)
            running.append(process)
        for process in running:
            builds.finish(process)
        # -Bsymbolic: the executor's cudaMalloc, even where torch has brought the real one.
        link = ["g++", "-shared", "-Wl,-Bsymbolic", *objects]
        built, process = builds.start(link, b"", CACHE, "ptx.so")
        builds.finish(process)
    return built


def _launchers(gxx, own: bytes, mutated: dict[str, Path]) -> list[tuple]:
    """(command, source, contents of its headers) of all that nvcc's kernels need."""
    gxx = [*gxx, f"-I{CSRC}", "-isystem", toolkit.nvcc().parents[1] / "include"]
    nvcc = [*_nvcc(), "-no-compress", "-Xcompiler=-fPIC", "-c"]
    compiles = [(gxx, CUDART, own), (gxx, LAUNCHERS, _headers(CSRC))]
    for op in OPS:
        csrc = mutated.get(op, CSRC)
        compiles.append((nvcc, csrc / "cuda" / f"{op}.cu", _headers(csrc)))
    return compiles


def ptx(source: Path) -> str:
    """What nvcc makes of a CUDA source that needs no header of ours."""
    with builds.alone(CACHE):
        command = [*_nvcc(), "-ptx", source]
        built, process = builds.start(command, source.read_bytes(), CACHE, source.stem + ".ptx")
        builds.finish(process)
    return built.read_text()


def _nvcc() -> list[str | Path]:
    return [toolkit.nvcc(), *toolkit.flags(), "-arch=compute_90"]


def _headers(csrc: Path) -> bytes:
    return builds.contents([*csrc.glob("cuda/**/*.cuh"), *csrc.glob("common/*.h")])
