"""What the conformance suite cannot ask of the CUDA kernels."""

import pytest
import torch
from conformance import samples

from dct_kernels import payload_layout

from .. import build
from ..backend import BACKEND, executor
from ..launchers import launchers
from . import runs

pytestmark = pytest.mark.skipif(
    build.missing() is not None, reason=f"not on this machine: {build.missing()}"
)
NUMEL, CAPACITY = 20000, 500


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("times", [2**7, 2**8])
def test_tiles_of_larger_tensors(times, seed):
    """Of 2 and 4 times as many elements, which a warp reads in several passes."""
    executor().cut_as_of(times)
    try:
        assert runs.findings(runs.mask_pack, BACKEND, executor(), seed) == ""
    finally:
        executor().cut_as_of(1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_offsets_that_are_no_segments(count, seed):
    """On a GPU they are not checked. What comes of them is not stated; every access is sound."""
    executor().configure(seed)
    offsets = torch.tensor([-(2**63), -1, 0, NUMEL // 3, NUMEL, 2**63 - 1])
    segments = torch.zeros(count + 1, dtype=torch.int64)

    def call(*arguments):  # after the checks
        segments.copy_(offsets[torch.randint(len(offsets), (count + 1,))])
        executor().call(*arguments)

    def sound():
        segments[:-1], segments[-1] = 0, NUMEL
        return segments

    backend, x = launchers(call), samples.normal(NUMEL)
    for picks in (100, 5000, 65536):
        backend.sample_threshold(x, None, sound(), 0.01, picks)
    for grad in (None, x):
        nbytes = payload_layout(NUMEL, CAPACITY, torch.float32).nbytes
        payload, seen = (
            torch.zeros(nbytes, dtype=torch.uint8),
            torch.zeros(count, dtype=torch.int32),
        )
        tensors = (x.clone(), grad, sound(), torch.ones(count), payload, seen)
        backend.mask_pack(*tensors, CAPACITY, torch.float32)
