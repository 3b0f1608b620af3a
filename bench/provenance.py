"""Describes the machine and the software of a measurement, for a JSON file of results."""

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch


def describe() -> dict[str, object]:
    """Describe the machine, software, command line and load, without paths or the host name."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "arguments": sys.argv[1:],
        "commit": _commit(),
        "cpu": _cpu(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str | None:
    """The commit of this checkout, or None."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
