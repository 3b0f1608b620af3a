"""The conformance suite on one backend's CUDA tensors; where pytest cannot run it, comparison.py.

python bench/gpu/conformance.py cuda OUT
"""

import importlib.util
import os
import sys

from common import ROOT, gpu_backends

NEEDED = ("pytest", "hypothesis", "numpy")
# Processes that share the GPU, and wait for each other if they are many. Triton mostly compiles.
WORKERS = {"cuda": 6, "triton": 12}


def suite(name: str, out: str) -> list[str]:
    """The suite's command, in several processes if that can be done."""
    # Not what needs no GPU: PTX that is executed on the CPU.
    command = ["-m", "pytest", "tests/conformance", "-k", f"{name} and not ptx"]
    command += ["-p", "no:cacheprovider"]
    command += ["-vv", "--durations", "5", "--junitxml", f"{out}/conformance_{name}.xml"]
    if importlib.util.find_spec("xdist"):
        command += ["--numprocesses", str(min(WORKERS[name], len(os.sched_getaffinity(0))))]
    return command


def main() -> None:
    name, out = sys.argv[1:]
    if name not in gpu_backends():
        raise SystemExit(f"no {name} backend for CUDA tensors: python -m dct_kernels says why")
    missing = [package for package in NEEDED if not importlib.util.find_spec(package)]
    command = suite(name, out)
    if missing:
        print(f"the small program, because these are missing: {', '.join(missing)}", flush=True)
        command = ["bench/gpu/comparison.py", "--backend", name]
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
