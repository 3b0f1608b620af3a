"""The backend "ptx-triton", in a process of its own: in one that interprets Triton's kernels they
cannot be compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU for Triton")
TESTS = Path(__file__).parents[1]


def compiled(*command: str) -> str:
    """What a command prints where Triton does not interpret."""
    result = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=TESTS,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.long
def test_conformance_and_mutants(request):
    """One case of each test, since every one of them has kernels that are to be compiled."""
    seed = request.config.getoption("--ptx-seed")
    chosen = ("-k", "ptx-triton or triton_mutants", "--triton-cases=1", f"--ptx-seed={seed}")
    print(compiled("pytest", "conformance", "ptx/triton_mutants.py", *chosen))


@pytest.mark.large
def test_more_mutants():
    print(compiled("pytest", "ptx/triton_mutants.py", "-m", "large"))


@pytest.mark.large
def test_every_form_is_known():
    print(compiled("ptx", "forms"))
