"""Builds what the other stages run: the extension, in place for the GPU at hand, what the bench
compares with, the variants, and the program that the sanitizers watch. Asks the extension which
backends it has.

    python bench/gpu/build.py
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import variant_builds
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
signal.signal(signal.SIGINT, signal.SIG_DFL)  # stopped at the stage's limit: no traceback
sys.path.insert(0, str(ROOT / "python"))

from dct_bench.kernels import native  # noqa: E402


def architecture() -> str:
    """The GPU's; Hopper's where there is none, so that at least the build is tried."""
    if not torch.cuda.is_available():
        return "9.0"
    return "{}.{}".format(*torch.cuda.get_device_capability())


def build_extension() -> None:
    """And meanwhile what the bench compares with."""
    os.environ["DCT_CUDA"] = "1"
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    running = subprocess.Popen(command, cwd=ROOT)
    reason = native.missing()
    print(f"native.cu: {reason or 'built'}", flush=True)
    variant_builds.build(architecture())
    if running.wait():
        raise SystemExit(running.returncode)  # its own last line says why


def build_sanitized() -> None:
    """bench/gpu/sanitize.cu with the extension's own objects: build/gpu/sanitize."""
    folder = ROOT / "build" / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    python = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    objects = sorted(ROOT.glob(f"build/temp.*-{python}/csrc/cuda/*.o"))
    nvcc = Path(cpp_extension.CUDA_HOME, "bin", "nvcc")
    source = ROOT / "bench" / "gpu" / "sanitize.cu"
    command = [nvcc, "-std=c++17", "-O1", f"-I{ROOT / 'csrc'}", source, *objects]
    subprocess.run([*command, "-o", folder / "sanitize"], check=True)


def main() -> None:
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architecture())
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    if cpp_extension.CUDA_HOME:
        os.environ.setdefault("CUDA_HOME", cpp_extension.CUDA_HOME)
    build_extension()
    build_sanitized()
    done = subprocess.run(
        [sys.executable, "-m", "dct_kernels"], cwd=ROOT, capture_output=True, text=True
    )
    print(done.stdout + done.stderr)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.startswith("  ")]
    has_cuda = any(line.startswith("cuda yes") for line in lines)
    print(f"sm {os.environ['TORCH_CUDA_ARCH_LIST']}: {'; '.join(lines) or 'import failed'}")
    raise SystemExit(0 if has_cuda else 1)


if __name__ == "__main__":
    main()
