"""Gradients of DistributedDataParallel, compressed; or weights, averaged every few steps.

Reading order: bucket_plan (what is sent, in numbers), transports (payloads of all ranks into their
mean: gather, shard), bucket (one bucket of DDP's), bf16 (one that is not compressed), link and
choice (which of these), node and node_bucket (of a cluster: whole inside a node, a part between
them), ranks (the groups for that), buckets (all of them), model, checkpoint, run, damage,
loss_scale, history, state (all of it behind torch's hook), averager (the same of weights), merge
(checkpoints for another world size).
"""

from .averager import DCTAverager
from .checkpoint import RECENT_STEPS
from .merge import merge_states
from .state import DCTState, dct_hook

__all__ = ["RECENT_STEPS", "DCTAverager", "DCTState", "dct_hook", "merge_states"]
