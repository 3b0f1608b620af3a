"""Tests "ptx-triton" in another process, because Triton either interprets or compiles kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU for Triton")
ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_conformance_and_mutants():
    """Runs one case of each test, because kernels must be compiled for each test."""
    tests = ("tests/conformance", "tools/ptx/tests/test_mutants.py")
    chosen = ("-k", "ptx-triton or missing_barrier", "--triton-cases=1")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *tests, *chosen],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
