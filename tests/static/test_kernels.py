"""Checks the machine code of the CUDA kernels, without a GPU."""

import functools
from pathlib import Path

import pytest
from ptx import toolkit
from ptx.kernels import Kernel, kernels

from .promises import LAST_BLOCK, PROMISES, STREAMS, Promise, broken_promises, promise_of

pytestmark = pytest.mark.skipif(
    toolkit.missing() is not None, reason=f"not on this machine: {toolkit.missing()}"
)
architectures = pytest.mark.parametrize("architecture", toolkit.ARCHITECTURES)


@functools.cache
def built(architecture: int) -> list[Kernel]:
    compiled = toolkit.compile_all(toolkit.KERNELS, architecture)
    return [kernel for source in compiled for kernel in kernels(source, architecture)]


@architectures
@pytest.mark.parametrize("name", PROMISES)
def test_kernels_keep_their_promises(name, architecture):
    instances = [kernel for kernel in built(architecture) if kernel.name.startswith(name)]
    assert instances, "no such kernel"
    broken = {k.name: broken_promises(k, promise_of(k)) for k in instances}
    assert broken == {k.name: [] for k in instances}


@architectures
def test_every_kernel_has_a_promise(architecture):
    names = {kernel.name for kernel in built(architecture)}
    assert {name for name in names if not name.startswith(tuple(PROMISES))} == set()


BAD_KERNELS = {
    "spills": (Promise(), {"local memory", "bytes of stack", "spilled bytes"}),
    "indexes": (Promise(), {"local memory", "bytes of stack"}),
    "fuses": (Promise(), {"fused multiply-adds"}),
    "flushes": (Promise(), {"subnormals to zero"}),
    "reads_scalars": (Promise(wide_loads=1, wide_stores=1), {"wide loads", "wide stores"}),
    "waits": (Promise(wide_loads=2, in_flight={STREAMS: 2}), {f"{STREAMS} in flight"}),
    "polls_weakly": (Promise(between_blocks=("LDG.E.64.STRONG.GPU",)), {"between blocks"}),
    "counts_alone": (Promise(), {"between blocks"}),
    "releases_nothing": (Promise(between_blocks=LAST_BLOCK, in_order=True), {"between blocks"}),
    "counts_too_late": (Promise(between_blocks=LAST_BLOCK, in_order=True), {"between blocks"}),
    "crowds": (Promise(), {"blocks"}),
}


@architectures
@pytest.mark.parametrize("name", BAD_KERNELS)
def test_a_broken_promise_is_detected(name, architecture):
    """No other promise is reported as broken."""
    (compiled,) = toolkit.compile_all([Path(__file__).with_name("bad_kernels.cu")], architecture)
    (kernel,) = (k for k in kernels(compiled, architecture) if k.name == name)
    promise, expected = BAD_KERNELS[name]
    assert {line.partition(":")[0] for line in broken_promises(kernel, promise)} == expected
