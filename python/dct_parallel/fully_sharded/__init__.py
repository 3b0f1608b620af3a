"""Gradients of torch's fully_shard (FSDP2), compressed between replicas of a sharded model.

Reading order: units (what FSDP hands over, and whose it is), step_consensus (what ranks tell each
other after a step), checkpoint, state (all of it behind FSDP's hook), hook (what users call).
"""

from .hook import dct_fully_shard_hook

__all__ = ["dct_fully_shard_hook"]
