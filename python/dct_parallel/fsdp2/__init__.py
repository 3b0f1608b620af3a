"""Gradients of torch's fully_shard (FSDP2), compressed between replicas of a sharded model.

Reading order: units (the gradients of FSDP's modules), step_consensus (the verdict of all ranks
after a step), checkpoint, state (all of it behind FSDP's hook), hook (the public function).
"""

from .hook import dct_fully_shard_hook

__all__ = ["dct_fully_shard_hook"]
