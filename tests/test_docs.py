"""The examples in the docstrings run, and print what they say; those in docs/training.md run."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TRAINING = Path(__file__).parent.parent / "docs" / "training.md"
# Fragments, which continue a program of the reader's, do not begin with an import.
PROGRAMS = [
    block
    for block in re.findall(r"```python\n(.*?)```", TRAINING.read_text(), re.DOTALL)
    if "import torch\n" in block
]


@pytest.mark.parametrize("name", ["dct_kernels.ops", "dct_kernels.layout"])
def test_docstring_examples(name):
    module = importlib.import_module(name)
    payload_layout = importlib.import_module("dct_kernels").payload_layout
    # Examples of one module may use the other's functions, as a user would.
    result = doctest.testmod(module, extraglobs={"payload_layout": payload_layout})
    assert result.attempted > 0
    assert result.failed == 0


def test_every_program_is_run():
    assert len(PROGRAMS) == 3


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=["cut", "pipeline", "exchange"])
def test_program(index, tmp_path):
    if "pipelining" in PROGRAMS[index]:
        version = torch.torch_version.TorchVersion(torch.__version__)
        if version < "2.13":
            pytest.skip("pipelining takes no integer tensors between stages before torch 2.13")
    script = tmp_path / "program.py"
    script.write_text(PROGRAMS[index])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, script] if "torchrun" in PROGRAMS[index] else [sys.executable, script]
    # From another folder: what is imported is the installation, not this checkout.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
