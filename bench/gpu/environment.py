"""Prints the versions of the software that affects measurements, and the GPU's clocks."""

import shutil
import subprocess

import torch
from torch.utils.collect_env import get_pretty_env_info

TOOLS = (
    ("nvidia-smi", "-q", "-d", "CLOCK,PERFORMANCE,POWER,TEMPERATURE"),
    *((tool, "--version") for tool in ("nvcc", "c++", "ncu", "compute-sanitizer")),
)


def main() -> None:
    print(get_pretty_env_info())
    for tool, *arguments in TOOLS:
        print(f"\n{tool}: {shutil.which(tool)}", flush=True)
        if shutil.which(tool):
            subprocess.run([tool, *arguments], timeout=20)
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is False")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")


if __name__ == "__main__":
    main()
