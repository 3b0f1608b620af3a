"""What every way of averaging compressed tensors shares: one bucket, from packing to its mean.

Reading order: codec (what is in a payload: the seam), plan (what is sent, in numbers), headers and
results (what ranks learn of it), transport (payloads of all ranks into their mean: all_gather,
reduce_scatter) and selection (which of them), segment_state (what moves with a parameter), bucket
(all of this for one flat tensor), readback; then the cycle of a step: run_guard (ranks go on from
the same), loss_scale, recent_stats, ledger; and checkpoints: fields, checkpoint, merge.
"""

from .merge import merge_states
from .recent_stats import RECENT_STEPS

__all__ = ["RECENT_STEPS", "merge_states"]
