"""Programs as a user runs them: alone, or under torchrun where they say so."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def blocks(path):
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def run(program, folder, *arguments, ranks=2):
    """What the file `program` prints; fails with what it complains of.

    In `folder`, not here: what is imported is the installation, not this checkout.
    """
    torchrun = [*TORCHRUN, f"--nproc-per-node={ranks}"]
    python = torchrun if "torchrun" in program.read_text() else [sys.executable]
    command = [*python, program, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
