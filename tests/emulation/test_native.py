"""The kernels under random schedules, bare and under the sanitizers, in programs of their own.

Python, torch and OpenMP are not instrumented, so sanitizers see only native programs. Each compares
its kernels with a straight reading of the contract.
"""

import os
import subprocess

import pytest

from . import build

PROGRAMS = {
    "mask_pack": ["mask_pack"],
    "scatter_unpack": ["scatter_unpack"],
    "thresholds": ["sample_threshold", "track_threshold"],
    "rows": ["row_pack", "row_gather", "row_unpack"],
    "quantized_rows": ["row_quantize", "row_dequantize"],
    "look_back": [],
}
SEEDS = {"none": range(1, 6), "address": range(1, 3), "thread": range(1, 3)}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "sanitizer",
    ["none", *(pytest.param(name, marks=pytest.mark.large) for name in ("address", "thread"))],
)
def test_native(program, sanitizer):
    binary = build.build(f"native/{program}.cpp", PROGRAMS[program], sanitizer=sanitizer)
    result = run(binary, sanitizer)
    assert result.returncode == 0, result.stderr


def run(binary, sanitizer):
    command = [binary, *map(str, SEEDS[sanitizer])]
    if sanitizer == "thread":
        # Its shadow memory must be unoccupied, which the randomisation of addresses can spoil.
        command = ["setarch", "-R", *command]
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        command, env=os.environ | options, capture_output=True, text=True, timeout=600
    )
