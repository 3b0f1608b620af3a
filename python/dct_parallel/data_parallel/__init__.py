"""Gradients of DistributedDataParallel, compressed.

Reading order: ddp_parameters (what a DDP averages), layout (how they lie in memory), node and
node_bucket (of a cluster: whole inside a node, a part between them), topology (the groups for
that), buckets (DDP's, each sent by the exchange), executors (beside the backward pass), state (all
of it behind torch's hook).
"""

from .state import DCTState, dct_hook

__all__ = ["DCTState", "dct_hook"]
