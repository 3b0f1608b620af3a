"""track_threshold: a feedback step per segment, in float32, each operation rounded."""

import triton
import triton.language as tl
from torch import Tensor

from .. import _contract
from ._launch import launch

SEGMENTS = 256  # of a program


# NaN if either is, unlike tl.minimum and tl.maximum.
@triton.jit
def _minimum(a, b):
    return tl.where((a != a) | (a < b), a, b)


@triton.jit
def _maximum(a, b):
    return tl.where((a != a) | (a > b), a, b)


@triton.jit(do_not_specialize=["num_segments"])
def _track_threshold_kernel(
    threshold, seen, target, reference, num_segments, SEGMENTS: tl.constexpr
):
    segment = tl.program_id(0).to(tl.int64) * SEGMENTS + tl.arange(0, SEGMENTS)
    inside = segment < num_segments
    tau = tl.load(threshold + segment, mask=inside, other=-1.0)
    wanted = tl.load(target + segment, mask=inside, other=1.0)
    anchor = tl.load(reference + segment, mask=inside, other=1.0)
    excess = tl.load(seen + segment, mask=inside, other=0).to(tl.float32) - wanted
    relative = tl.div_rn(excess * 0.05, _maximum(wanted, 1.0))
    moved = tau * (_minimum(_maximum(relative, -0.05), 0.25) + 1.0)
    moved = _minimum(_maximum(moved, anchor * 0.25), anchor * 64.0)
    tl.store(threshold + segment, moved, mask=inside & ~(tau < 0))  # a skipped segment stays so


def track_threshold(threshold: Tensor, seen: Tensor, target: Tensor, reference: Tensor) -> None:
    _contract.track_threshold(threshold, seen, target, reference)
    num_segments = threshold.numel()
    launch(
        _track_threshold_kernel, triton.cdiv(num_segments, SEGMENTS),
        threshold, seen, target, reference, num_segments, SEGMENTS=SEGMENTS,
        device=threshold.device,
    )  # fmt: skip
