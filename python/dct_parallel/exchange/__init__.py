"""The average of compressed tensors over ranks: one bucket, from packing to its mean.

Reading order: codec (the content of payloads), plan (their number and bytes), headers and results
(damage, overflow, counts), transport (payloads of all ranks into their mean: all_gather,
reduce_scatter) and selection (which of them), segment_state (the state of a parameter), bucket (all
of this for one flat tensor), readback; then the cycle of a step: loss_scale, optimizer_steps,
recent_stats, ledger; and checkpoints: fields, checkpoint, merge.
"""

from .checkpoint import merge_states
from .results import RECENT_STEPS

__all__ = ["RECENT_STEPS", "merge_states"]
