"""What the conformance suite cannot ask of the CUDA kernels."""

import pytest

from .. import build
from ..backend import BACKEND, executor
from . import runs

pytestmark = pytest.mark.skipif(
    build.missing() is not None, reason=f"not on this machine: {build.missing()}"
)


@pytest.mark.parametrize("seed", range(3))
def test_tiles_of_larger_tensors(seed):
    """Of a thousand times as many elements, which a warp reads in two passes."""
    executor().cut_as_of(2**10)
    try:
        assert runs.findings(runs.mask_pack, BACKEND, executor(), seed) == ""
    finally:
        executor().cut_as_of(1)
