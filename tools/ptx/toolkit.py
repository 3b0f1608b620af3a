"""Compiles CUDA sources to PTX and to machine code for an architecture, without a GPU.

Needs nvcc, and cuobjdump and nvdisasm from the same toolkit or an installed Triton.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from . import cache

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
KERNELS = sorted(CSRC.glob("cuda/*.cu"))
ARCHITECTURES = (80, 90, 100)


class Compiled(NamedTuple):
    """The compiler outputs for all kernels of a source file."""

    ptx: str
    report: str  # from ptxas: registers, stack and spills
    sass: str  # the machine code
    listing: str  # the machine code with the line of PTX of each instruction


def missing() -> str | None:
    """The missing requirement, or None."""
    if nvcc() is None:
        return "nvcc (set CUDA_HOME or PATH)"
    if cuobjdump() is None:
        return "cuobjdump (part of full CUDA toolkits and of Triton)"
    if not nvdisasm().exists():
        return f"{nvdisasm()} in the folder of cuobjdump"
    return None


def ptx(sources: Sequence[Path], architecture: int = 90) -> list[str]:
    """Compile sources with nvcc in parallel, or use cached results."""
    command = [nvcc(), *flags(), f"-arch=compute_{architecture}", "-ptx"]
    with cache.alone():
        started = [
            cache.start([*command, path], headers() + path.read_bytes(), f"{path.stem}.ptx")
            for path in sources
        ]
        for _, process in started:
            cache.finish(process)
    return [path.read_text() for path, _ in started]


def assemble(ptx: str, architecture: int) -> Compiled:
    """Compile a PTX text with ptxas, or use the cached result."""
    key = hashlib.sha256(f"{ptx}{architecture}{nvcc_version()}".encode()).hexdigest()[:16]
    kept = cache.FOLDER / f"{key}.json"
    if not kept.exists():
        source = kept.with_suffix(f".{os.getpid()}.ptx")
        cubin = source.with_suffix(".cubin")
        source.write_text(ptx)
        # -lineinfo records the lines of PTX and does not change instructions.
        flags = (f"-arch=sm_{architecture}", "-lineinfo", "-v")
        report = _output(nvcc().with_name("ptxas"), *flags, "-o", cubin, source)
        sass = _output(cuobjdump(), "-sass", cubin)
        listing = _output(nvdisasm(), "-c", "-gp", cubin)
        partial = source.with_suffix(".json")
        partial.write_text(json.dumps([report, sass, listing]))
        partial.rename(kept)
        source.unlink()
        cubin.unlink()
    return Compiled(ptx, *json.loads(kept.read_text()))


def compile_all(sources: Sequence[Path], architecture: int) -> list[Compiled]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda text: assemble(text, architecture), ptx(sources, architecture)))


def demangle(symbol: str) -> str:
    """Convert a kernel's symbol to `name<arguments>`, without namespaces and parameters."""
    full = _output("c++filt", symbol).replace("(anonymous namespace)", "").strip()
    return re.sub(r"\w*::", "", re.search(r"[\w:]+(<.*?>)?(?=\()", full)[0])


def headers(csrc: Path = CSRC) -> bytes:
    return cache.contents([*csrc.glob("cuda/**/*.cuh"), *csrc.glob("common/*.h")])


@functools.cache
def flags() -> list[str]:
    """The nvcc flags in setup.py that affect the machine code."""
    found = re.search(r"nvcc = (\[)\*common, (.*\])", (ROOT / "setup.py").read_text())
    return ["-std=c++17", "-O3", *ast.literal_eval(found[1] + found[2])]


@functools.cache
def nvcc() -> Path | None:
    """The nvcc in the toolkit. The nvcc on PATH may be a link or a script."""
    home = os.environ.get("CUDA_HOME")
    if not home and shutil.which("nvcc"):
        plan = _output("nvcc", "--dryrun", "-x", "cu", os.devnull)
        home = re.search(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)[1]
    nvcc = Path(home or "", "bin", "nvcc").resolve()
    return nvcc if home and nvcc.exists() else None


@functools.cache
def nvcc_version() -> str:
    return re.search(r"V([\d.]+)", _output(nvcc(), "--version"))[1]


@functools.cache
def cuobjdump() -> Path | None:
    """The path of cuobjdump, which extracts and disassembles machine code, or None."""
    folders = [nvcc().parent]
    triton = importlib.util.find_spec("triton")
    if triton is not None:
        folders += [Path(path, "backends/nvidia/bin") for path in triton.submodule_search_locations]
    return next(filter(Path.exists, (folder / "cuobjdump" for folder in folders)), None)


def nvdisasm() -> Path:
    return cuobjdump().with_name("nvdisasm")


def _output(*command: str | Path) -> str:
    """stdout and stderr of a command; nvcc writes its report to stderr."""
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{result.stdout}")
    return result.stdout
