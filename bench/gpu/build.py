"""Builds the extension in place for this machine's GPU, and the kernels of native.cu."""

import os
import subprocess
import sys

import torch

from bench.microbench import native


def main() -> None:
    # Without a GPU, build for Hopper to test the build.
    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*gpu))
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    os.environ["DCT_CUDA"] = "1"
    building = subprocess.Popen([sys.executable, "setup.py", "build_ext", "--inplace"])
    print(f"peers: {native.missing() or 'built'}", flush=True)
    if building.wait():
        raise SystemExit(building.returncode)  # the build has printed the reason
    command = [sys.executable, "-m", "dct_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(done.stdout)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.startswith("  ")]
    print(f"sm {os.environ['TORCH_CUDA_ARCH_LIST']}: {'; '.join(lines)}")
    raise SystemExit(not any(line.startswith("cuda yes") for line in lines))


if __name__ == "__main__":
    main()
