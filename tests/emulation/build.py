"""Builds programs and libraries of the CUDA sources with g++ and the emulator.

One place for the flags, used by the emulated backend, the native tests and the mutants.
"""

from collections.abc import Sequence
from pathlib import Path

import builds

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
    headers = [*HERE.rglob("*.h"), *csrc.glob("cuda/**/*.cuh"), *csrc.glob("common/*.h")]
    headers = builds.contents(headers)
    include = [f"-I{HERE / 'include'}", f"-I{HERE / 'native'}", f"-I{csrc}"]

    with builds.alone(CACHE):
        objects, running = [], []
        for source, flags in compiles:
            command = ["g++", *_FLAGS, *flags, *include, "-c", "-x", "c++", str(source)]
            text = headers + source.read_bytes()
            built, process = builds.start(command, text, CACHE, source.stem + ".o")
            objects.append(built)
            running.append(process)
        for process in running:
            builds.finish(process)
        link = ["g++", *_FLAGS, *_SANITIZERS[sanitizer], *(["-shared"] if shared else []), *objects]
        name = Path(main).stem + (".so" if shared else "")
        built, process = builds.start(link, b"", CACHE, name)
        builds.finish(process)
    return built
