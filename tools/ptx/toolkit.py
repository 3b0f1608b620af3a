"""Compiles CUDA sources to machine code for an architecture, and reads what came out.

Needs nvcc, and cuobjdump of the same toolkit or of an installed Triton; no GPU.
"""

import ast
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "static"
KERNELS = sorted(ROOT.glob("csrc/cuda/*.cu"))
ARCHITECTURES = (80, 90, 100)


class Compiled(NamedTuple):
    """Texts. ptx: what the source asks for; report: what ptxas gave it; sass: the machine code."""

    ptx: str
    report: str
    sass: str


def missing() -> str | None:
    """What is not there and has to be, or None."""
    if nvcc() is None:
        return "nvcc (CUDA_HOME or PATH says where)"
    if cuobjdump() is None:
        return "cuobjdump (it is in full CUDA toolkits, and in Triton)"
    return None


def compile_all(sources: list[Path], architecture: int) -> list[Compiled]:
    """Two at a time. What is newer than its sources and its compiler is not compiled again."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda source: _compile(source, architecture), sources))


def demangle(symbol: str) -> str:
    """`name<arguments>` of a kernel's symbol, without namespaces and parameters."""
    full = _output("c++filt", symbol).replace("(anonymous namespace)", "").strip()
    return re.sub(r"\w*::", "", re.search(r"[\w:]+(<.*?>)?(?=\()", full)[0])


def _compile(source: Path, architecture: int) -> Compiled:
    stem = BUILD / f"{source.stem}.sm_{architecture}"
    files = [stem.with_suffix(stem.suffix + kind) for kind in (".ptx", ".report", ".sass")]
    newest = max(source.stat().st_mtime, _newest_source())
    if not all(file.exists() and file.stat().st_mtime > newest for file in files):
        ptx, report, sass = files
        cubin = ptx.with_suffix(".cubin")
        BUILD.mkdir(parents=True, exist_ok=True)
        _output(nvcc(), *flags(), "-ptx", f"-arch=compute_{architecture}", "-o", ptx, source)
        command = [nvcc(), "-cubin", f"-arch=sm_{architecture}", "-Xptxas=-v", "-o", cubin, ptx]
        report.write_text(_output(*command))
        sass.write_text(_output(cuobjdump(), "-sass", cubin))
    return Compiled(*(file.read_text() for file in files))


@functools.cache
def _newest_source() -> float:
    sources = [ROOT / "setup.py", *ROOT.glob("csrc/**/*.*"), Path(__file__), nvcc()]
    return max(path.stat().st_mtime for path in sources)


@functools.cache
def flags() -> list[str]:
    """Those of setup.py that decide about machine code."""
    own = re.search(r"nvcc = (\[)\*common, (.*\])", (ROOT / "setup.py").read_text())
    return ["-std=c++17", "-O3", *ast.literal_eval(own[1] + own[2])]


@functools.cache
def nvcc() -> Path | None:
    """The toolkit's own: the one on PATH may be a link or a script."""
    home = os.environ.get("CUDA_HOME")
    if not home and shutil.which("nvcc"):
        plan = _output("nvcc", "--dryrun", "-x", "cu", os.devnull)
        home = re.search(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)[1]
    nvcc = Path(home or "", "bin", "nvcc").resolve()
    return nvcc if home and nvcc.exists() else None


@functools.cache
def cuobjdump() -> Path | None:
    """What reads machine code."""
    folders = [nvcc().parent]
    triton = importlib.util.find_spec("triton")
    if triton is not None:
        folders += [Path(path, "backends/nvidia/bin") for path in triton.submodule_search_locations]
    found = (folder / "cuobjdump" for folder in folders)
    return next(filter(Path.exists, found), None)


def _output(*command: str | Path) -> str:
    """stdout and stderr: nvcc writes its report to the latter."""
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{result.stdout}")
    return result.stdout
