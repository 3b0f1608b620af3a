"""Checks Triton's compiled kernels for spills, fused multiply-adds and the width of accesses.

The kernels are compiled in a separate process. A process that interprets kernels
(TRITON_INTERPRET=1), as in the conformance suite, cannot compile them.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from .cases import ARCHITECTURES, CASES

pytest.importorskip("triton", reason="Triton is not installed")

BY_DEFAULT = ("sm_90", "gfx942")  # `make triton` compiles the others
architectures = pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.large)
        for name in ARCHITECTURES
    ],
)


@functools.cache
def compiled(architecture):
    """{name of a case: its compiled kernels}."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *sys.path])
    result = subprocess.run(
        [sys.executable, "-m", "tests.aot", architecture],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    facts = json.loads(result.stdout)
    return {
        name: [SimpleNamespace(**kernel) for kernel in kernels] for name, kernels in facts.items()
    }


@architectures
@pytest.mark.parametrize("name", CASES)
def test_kernels(architecture, name):
    kernels = compiled(architecture)[name]
    assert kernels
    for kernel in kernels:
        assert not kernel.fusion
        none = CASES[name].none
        if architecture in CASES[name].dividing:
            # The slow path of a division is a call, for which some assemblers spill two registers.
            assert kernel.spills <= 8
        else:
            none = (*none, "spills", "fma")
        assert {count: getattr(kernel, count) for count in none} == dict.fromkeys(none, 0)
    for count in CASES[name].some:
        assert sum(getattr(kernel, count) for kernel in kernels) > 0, count
