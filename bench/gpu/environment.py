"""Versions of everything that a measurement depends on: environment.json in the folder OUT.

python bench/gpu/environment.py OUT
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

TOOLS = {
    "nvidia-smi": (
        "--query-gpu=name,driver_version,memory.total,clocks.mem,clocks.sm",
        "--format=csv",
    ),
    "nvcc": ("--version",),
    "c++": ("--version",),
    "compute-sanitizer": ("--version",),
    "ncu": ("--version",),
    "git": ("rev-parse", "HEAD"),
}
PACKAGES = ("setuptools", "triton", "numpy", "ninja", "pytest", "hypothesis", "xdist", "rich")


def said(command: str, *arguments: str) -> str | None:
    """What a tool prints, or None where it is not there."""
    if shutil.which(command) is None:
        return None
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=30)
    return (done.stdout or done.stderr).strip()


def version(package: str) -> str | None:
    try:
        return getattr(__import__(package), "__version__", "there")
    except ImportError:
        return None


def device() -> dict[str, object] | None:
    if not torch.cuda.is_available():
        return None
    of = torch.cuda.get_device_properties(0)
    return {
        "name": of.name,
        "capability": f"{of.major}.{of.minor}",
        "multiprocessors": of.multi_processor_count,
        "memory": of.total_memory,
        "l2": of.L2_cache_size,
    }


def main() -> None:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "packages": {package: version(package) for package in PACKAGES},
        "cuda_home": os.environ.get("CUDA_HOME"),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "gpu": device(),
        "tools": {tool: said(tool, *arguments) for tool, arguments in TOOLS.items()},
    }
    Path(sys.argv[1], "environment.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    if found["gpu"] is None:
        raise SystemExit("no GPU: torch.cuda.is_available() is False")
    print(f"{found['gpu']['name']}, torch {found['torch']}, CUDA {found['torch_cuda']}")


if __name__ == "__main__":
    main()
