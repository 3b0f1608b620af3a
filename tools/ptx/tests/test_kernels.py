"""What the conformance suite cannot ask of the CUDA kernels."""

import pytest

from .. import build
from ..backend import BACKEND, executor
from . import runs

pytestmark = pytest.mark.skipif(
    build.missing() is not None, reason=f"not on this machine: {build.missing()}"
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("times", [2**7, 2**8])
def test_tiles_of_larger_tensors(times, seed):
    """Of 2 and 4 times as many elements, which a warp reads in several passes."""
    executor().cut_as_of(times)
    try:
        assert runs.findings(runs.mask_pack, BACKEND, executor(), seed) == ""
    finally:
        executor().cut_as_of(1)
