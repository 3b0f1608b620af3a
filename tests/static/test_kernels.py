"""Checks the machine code of the CUDA kernels, without a GPU."""

import functools

import pytest
from ptx import toolkit
from ptx.kernels import Kernel, kernels

from .promises import PROMISES, broken_promises, promise_of

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
