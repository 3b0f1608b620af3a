"""Tests of the CUDA kernels that cannot be part of the conformance suite."""

import pytest

from .. import build
from ..backend import BACKEND, executor
from . import runs

pytestmark = pytest.mark.skipif(
    build.missing() is not None, reason=f"not on this machine: {build.missing()}"
)


@pytest.mark.parametrize("seed", range(3))
def test_tiles_of_larger_tensors(seed):
    """Uses tile sizes for 1,024 times as many elements. A warp reads a tile in two passes."""
    executor().tile_as_for(2**10)
    try:
        assert runs.findings(runs.mask_pack, BACKEND, executor(), seed) == ""
    finally:
        executor().tile_as_for(1)
