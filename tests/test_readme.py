"""The Python blocks of README.md run as written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_every_block_is_run():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("index", range(len(BLOCKS)), ids=["ops", "hook", "rows"])
def test_block(index, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[index])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, script] if "torchrun" in BLOCKS[index] else [sys.executable, script]
    # From another folder: what is imported is the installation, not this checkout.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if "plan()" in BLOCKS[index]:
        assert "transport: gather" in done.stdout
