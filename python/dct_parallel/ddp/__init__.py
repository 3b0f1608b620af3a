"""Gradients of DistributedDataParallel, compressed.

Reading order: ddp_parameters (those that a DDP averages), layout (their order in memory), node and
node_bucket (a cluster: dense inside a node, compressed between nodes), topology (the groups for
that), buckets (DDP's, each sent by the exchange), executors (beside the backward pass), state (all
of it behind torch's hook).
"""

from .state import DCTState, dct_hook

__all__ = ["DCTState", "dct_hook"]
