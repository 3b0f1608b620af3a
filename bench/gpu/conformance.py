"""The conformance suite on one backend's CUDA tensors; where pytest cannot run it, comparison.py.

    python bench/gpu/conformance.py cuda OUT [WORD]

WORD: of all tests, only those of which the name or the file has this word.
"""

import importlib.util
import os
import sys

from common import ROOT, gpu_backends

NEEDED = ("pytest", "hypothesis", "numpy")
# Processes that share the GPU, and wait for each other if they are many. Triton mostly compiles.
WORKERS = {"cuda": 6, "triton": 12}


def suite(name: str, out: str, *only: str) -> list[str]:
    """The suite's command, in several processes if that can be done."""
    # Not what needs no GPU: PTX that is executed on the CPU.
    chosen = " and ".join((name, "not ptx", *only))
    command = ["-m", "pytest", "tests/conformance", "-k", chosen]
    command += ["-p", "no:cacheprovider"]
    command += [
        "-vv",
        "--durations",
        "5",
        "--junitxml",
        f"{out}/conformance_{'_'.join((name, *only))}.xml",
    ]
    if importlib.util.find_spec("xdist"):
        command += ["--numprocesses", str(min(WORKERS[name], len(os.sched_getaffinity(0))))]
    return command


def main() -> None:
    name, out, *only = sys.argv[1:]
    if name not in gpu_backends():
        raise SystemExit(f"no {name} backend for CUDA tensors: python -m dct_kernels says why")
    missing = [package for package in NEEDED if not importlib.util.find_spec(package)]
    command = suite(name, out, *only)
    if missing:
        print(f"the small program, because these are missing: {', '.join(missing)}", flush=True)
        command = ["bench/gpu/comparison.py", "--backend", name]
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
