"""Builds programs and libraries of the CUDA sources with g++ and the emulator.

One place for the flags, used by the emulated backend, the native tests and the planted faults.
Everything is kept in build/emulation under a name that follows from its sources and flags, so
nothing is compiled twice, by several processes neither: one builds, the others wait.
"""

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
CACHE = HERE.parents[1] / "build" / "emulation"

# -ffp-contract=off: no fused multiply-adds, like __fmul_rn and __fadd_rn on a GPU.
# -fno-strict-aliasing: vector loads reinterpret memory, which nvcc allows.
_FLAGS = [
    *("-std=c++17", "-g", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
]
_SANITIZERS = {
    "none": ["-O2"],
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
_DEFINITIONS = {"none": [], "address": ["-DEMULATOR_ASAN"], "thread": ["-DEMULATOR_TSAN"]}


def build(
    main: str,
    kernels: Sequence[str],
    shared: bool = False,
    sanitizer: str = "none",
    csrc: Path = CSRC,
) -> Path:
    """Compile `main`, a file of this folder, with the named `kernels` of `csrc`/cuda.

    Returns the program, or with `shared` the library.
    """
    sources = [HERE / main, *(csrc / "cuda" / f"{kernel}.cu" for kernel in kernels)]
    # The emulator is never instrumented: see emulator.cpp.
    compiles = [(HERE / "emulator.cpp", ["-O2", *_DEFINITIONS[sanitizer]])]
    compiles += [(source, _SANITIZERS[sanitizer]) for source in sources]
    headers = _contents([*HERE.rglob("*.h"), *csrc.glob("cuda/**/*.cuh"), *csrc.glob("common/*.h")])
    include = [f"-I{HERE / 'include'}", f"-I{HERE / 'native'}", f"-I{csrc}"]

    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"):
        objects, running = [], []
        for source, flags in compiles:
            command = ["g++", *_FLAGS, *flags, *include, "-c", "-x", "c++", str(source)]
            built, process = _start(command, headers + source.read_bytes(), source.stem + ".o")
            objects.append(built)
            running.append(process)
        for process in running:
            _finish(process)
        link = ["g++", *_FLAGS, *_SANITIZERS[sanitizer], *(["-shared"] if shared else []), *objects]
        built, process = _start(link, b"", Path(main).stem + (".so" if shared else ""))
        _finish(process)
    return built


def _contents(paths: Sequence[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(paths))


def _start(command, contents, name):
    """Start `command`, unless what it makes is there; returns that, and what to wait for."""
    # Sources keep their key when a copy of the tree is built: planted faults change few of them.
    words = [Path(word).name if "/" in str(word) else str(word) for word in command]
    key = hashlib.sha256(" ".join(words).encode() + contents).hexdigest()[:16]
    output = CACHE / f"{key}-{name}"
    if output.exists():
        return output, None
    partial = output.with_name(f"{output.name}.{os.getpid()}")
    return output, (subprocess.Popen([*command, "-o", partial]), partial, output)


def _finish(started):
    if started is None:
        return
    process, partial, output = started
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)
    partial.rename(output)
