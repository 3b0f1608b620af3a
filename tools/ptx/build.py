"""Builds libraries of the executor, by g++, with the launchers and their PTX, by nvcc."""

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


def build() -> Path:
    """Builds the executor and, if nvcc is found, the launchers and kernels of all ops."""
    own = cache.contents(HERE.glob("*.h"))
    gxx = ["g++", *_FLAGS, "-c"]
    sources = sorted(set(HERE.glob("*.cpp")) - {CUDART, LAUNCHERS})
    compiles = [(gxx, source, own) for source in sources]
    if missing() is None:
        compiles += _launchers(gxx, own)

    with cache.alone():
        objects, running = [], []
        for command, source, headers in compiles:
            text = headers + source.read_bytes()
            built, process = cache.start([*command, source], text, source.stem + ".o")
            objects.append(built)
            running.append(process)
        for process in running:
            cache.finish(process)
        # -Bsymbolic: the executor's cudaMalloc, even where torch has brought the real one.
        link = ["g++", "-shared", "-Wl,-Bsymbolic", *objects]
        built, process = cache.start(link, b"", "ptx.so")
        cache.finish(process)
    return built


def _launchers(gxx, own: bytes) -> list[tuple]:
    """(command, source, contents of its headers) of all that nvcc's kernels need."""
    gxx = [*gxx, f"-I{toolkit.CSRC}", "-isystem", toolkit.nvcc().parents[1] / "include"]
    nvcc = [toolkit.nvcc(), *toolkit.flags(), "-arch=compute_90"]
    nvcc += ["-no-compress", "-Xcompiler=-fPIC", "-c"]
    headers = toolkit.headers()
    kernels = [(nvcc, toolkit.CSRC / "cuda" / f"{op}.cu", headers) for op in OPS]
    return [(gxx, CUDART, own), (gxx, LAUNCHERS, headers), *kernels]
