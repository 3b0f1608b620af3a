"""Builds the extension in place for the GPU at hand, and asks it which backends it has.

python bench/gpu/build.py
"""

import os
import signal
import subprocess
import sys

import torch

signal.signal(signal.SIGINT, signal.SIG_DFL)  # stopped at the stage's limit: no traceback
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def architecture() -> str:
    """The GPU's; Hopper's where there is none, so that at least the build is tried."""
    if not torch.cuda.is_available():
        return "9.0"
    return "{}.{}".format(*torch.cuda.get_device_capability())


def main() -> None:
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architecture())
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    os.environ["DCT_CUDA"] = "1"
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    status = subprocess.run(command, cwd=ROOT).returncode
    if status:
        raise SystemExit(status)  # its own last line says why
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
