"""Mutants of what Triton makes, its PTX without a barrier or a guard, are caught.

pytest is given this file by name, in a process where Triton compiles (test_triton.py).
"""

import re

import pytest
import torch
import triton
import triton.language as tl
from conftest import BACKENDS

from dct_kernels.layout import QUANTIZED_CODES

from . import runs, triton_runs
from .backend import executor

BACKEND = BACKENDS["ptx-triton"]
SEEDS = range(1, 6)
# Each takes seconds to compile: by default those with the most barriers of each kind.
BY_DEFAULT = (runs.mask_pack, runs.scatter_unpack, runs.row_pack)
MORE = (
    *(runs.sample_threshold, runs.row_gather),
    *(runs.row_unpack, runs.row_quantize, runs.row_dequantize),
    *(triton_runs.quantize_pack, triton_runs.dequantize_sum, triton_runs.dequantize_sum_pack),
)
every_run = pytest.mark.parametrize(
    "run", [*BY_DEFAULT, *(pytest.param(run, marks=pytest.mark.large) for run in MORE)]
)


def kernels(run) -> dict[str, str]:
    """{kernel: PTX} of all that a run launches."""
    executor().configure(0)
    run(BACKEND)
    _, *reports = executor().counts().split("\n\n")
    names = [report.split()[0] for report in reports]
    return {name: executor().text(name) for name in names}


def lines(text: str, instruction: str) -> list[re.Match]:
    """Those that have an instruction; groups: its guard, and the rest."""
    pattern = rf"^\s*(@!?%p\d+\s+)?({instruction}\s[^;]*;)"
    return list(re.finditer(pattern, text, re.MULTILINE))


def finding(run, kernel: str, mutant: str) -> str:
    """The first under any seed where a kernel has been replaced, or ''."""
    sound = executor().text(kernel)
    executor().load(mutant)
    try:
        found = (runs.findings(run, BACKEND, executor(), seed) for seed in SEEDS)
        return next(filter(None, found), "")
    finally:
        executor().load(sound)


@every_run
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(100), marks=pytest.mark.large)])
def test_sound_kernels_are_silent(run, seeds):
    assert {runs.findings(run, BACKEND, executor(), seed) for seed in seeds} == {""}


BARRIER = r"bar\.(?:warp\.)?sync"


@every_run
def test_a_missing_barrier_is_caught(run):
    """Each is taken out alone. One in ten may not be needed, such as one before the first store."""
    caught, missed = 0, []
    for kernel, text in kernels(run).items():
        for line in lines(text, BARRIER):
            found = finding(run, kernel, text[: line.start(2)] + text[line.end(2) :])
            assert found == "" or "data race" in found
            caught += found != ""
            missed += [] if found else [(kernel, line[2])]
    assert len(missed) <= caught // 9, missed


@pytest.mark.large
@every_run
def test_a_missing_guard_of_a_store_is_caught(run):
    """Each is taken out alone: a store out of bounds, or a race of threads with the same element.
    Of those that hold for every thread of these runs nothing is seen."""
    caught, missed = 0, []
    for kernel, text in kernels(run).items():
        for line in lines(text, r"st\.global\S*"):
            if line[1] is None:
                continue
            found = finding(run, kernel, text[: line.start(1)] + text[line.end(1) :])
            caught += found != ""
            missed += [] if found else [(kernel, line[0])]
    assert caught >= len(missed) // 3, missed


@pytest.mark.parametrize("run", [triton_runs.quantize_pack, triton_runs.dequantize_sum_pack])
def test_a_missing_flag_is_caught(run):
    """Of a header, which every kernel that packs raises at two places."""
    left_out = [
        (kernel, text[: line.start()] + text[line.end() :])
        for kernel, text in kernels(run).items()
        for line in lines(text, r"(?:atom|red)\.global\S*\.or\.b32")
    ]
    assert len(left_out) == 2 * len(QUANTIZED_CODES)
    assert {finding(run, *mutant) for mutant in left_out} == {"wrong"}


@triton.jit
def _copy(x, out):
    tl.store(out, tl.load(x))


@triton.jit
def _sine(x, out):
    sine = tl.inline_asm_elementwise(
        "sin.approx.f32 $0, $1;", "=f,f", [tl.load(x)], tl.float32, is_pure=True, pack=1
    )
    tl.store(out, sine)


def test_what_is_left_out_is_named():
    x = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"unknown opcode sin\.approx\.f32"):
        _sine[(1,)](x, torch.zeros_like(x), enable_fp_fusion=False)
    with pytest.raises(NotImplementedError, match="_copy uses launch_cooperative_grid"):
        options = {"enable_fp_fusion": False, "launch_cooperative_grid": True}
        _copy[(1,)](x, torch.zeros_like(x), **options)
