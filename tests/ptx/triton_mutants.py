"""Mutants of what Triton makes, its PTX without a barrier or a guard, or with another constant, are
caught.

pytest is given this file by name, in a process where Triton compiles (test_triton.py).
"""

import re

import pytest
import torch
import triton
import triton.language as tl
from aot import bad_kernels
from conformance import samples
from conftest import BACKENDS

from dct_kernels import payload_layout

from . import runs
from .backend import executor

BACKEND = BACKENDS["ptx-triton"]
SEEDS = range(1, 6)


def e3m0(backend):
    """Packed and read. Ties, codes of both ends, entries that cannot be sent; a scale past them."""
    numel, capacity = 16384 + 4096 + 77, 20000
    residual, grad = samples.normal(numel), samples.normal(numel, seed=1)
    residual[:60] = 1.5 * 2.0 ** torch.arange(-20, 40)
    grad[:60] = 0
    grad[[5000, 6000]] = torch.inf
    nbytes = payload_layout(numel, capacity, "e3m0").nbytes
    payload, seen = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    arguments = (residual, grad, torch.tensor([0, numel]), torch.full((1,), 0.5), payload, seen)
    e3m0 = {"value_dtype": torch.bfloat16, "value_format": "e3m0"}
    backend.mask_pack(*arguments, capacity, **e3m0, scale=torch.ones(1))
    payloads, out = payload.repeat(3, 1), torch.zeros(numel)
    payloads[1, 24] = 248
    status = backend.scatter_unpack(payloads, out, capacity, **e3m0)
    return residual, payload, seen, status, out.nan_to_num()


# Each takes seconds to compile: by default those with the most barriers of each kind.
BY_DEFAULT = (runs.mask_pack, runs.scatter_unpack, runs.row_pack)
MORE = (
    *(runs.sample_threshold, runs.row_gather),
    *(runs.row_unpack, runs.row_quantize, runs.row_dequantize, e3m0),
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


@pytest.mark.parametrize(("kernel", "right", "wrong"), [
    ("_mark_kernel", ", 260046848;", ", 251658240;"),  # 2^31 scales cannot be sent
    ("_pack_kernel", ", 4194304;", ", 4194303;"),  # half, of a mantissa
    ("_check_kernel", ", 247;", ", 248;"),  # the largest scale
    ("_add_kernel", ", 32767;", ", 2047;"),  # a sub-start: positions move
])  # fmt: skip
def test_another_constant_of_e3m0_is_caught(kernel, right, wrong):
    name, text = next((n, t) for n, t in kernels(e3m0).items() if n.startswith(kernel))
    assert right in text
    assert finding(e3m0, name, text.replace(right, wrong)) != ""


@triton.jit
def _copy(x, out):
    tl.store(out, tl.load(x))


def test_what_is_left_out_is_named():
    with pytest.raises(RuntimeError, match=r"unknown opcode fma\.rn\.f32"):
        bad_kernels.fused()
    x = torch.zeros(1)
    with pytest.raises(NotImplementedError, match="_copy uses launch_cooperative_grid"):
        options = {"enable_fp_fusion": False, "launch_cooperative_grid": True}
        _copy[(1,)](x, torch.zeros_like(x), **options)
