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
    "thresholds": ["sample_threshold"],
    "rows": ["row_pack", "row_gather", "row_unpack"],
    "quantized_rows": ["row_quantize", "row_dequantize"],
}
SEEDS = {"none": range(1, 7), "address": range(1, 3), "thread": range(1, 3)}
MANY_SEEDS = range(1, 101)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "sanitizer",
    ["none", *(pytest.param(name, marks=pytest.mark.large) for name in ("address", "thread"))],
)
def test_native(program, sanitizer):
    binary = build.build(f"native/{program}.cpp", PROGRAMS[program], sanitizer=sanitizer)
    result = run(binary, sanitizer, SEEDS[sanitizer])
    assert result.returncode == 0, result.stderr


@pytest.mark.large
@pytest.mark.parametrize("program", PROGRAMS)
def test_sound_sources_are_silent(program):
    result = run(build.build(f"native/{program}.cpp", PROGRAMS[program]), "none", MANY_SEEDS)
    assert result.returncode == 0, result.stderr


def run(binary, sanitizer, seeds):
    command = [binary, *map(str, seeds)]
    if sanitizer == "thread":
        # Its shadow memory must be unoccupied, which the randomisation of addresses can spoil.
        command = ["setarch", "-R", *command]
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        command, env=os.environ | options, capture_output=True, text=True, timeout=600
    )
