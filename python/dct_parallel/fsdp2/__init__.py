"""Gradients of fully_shard (FSDP2), compressed between replicas of a sharded model."""

from .hook import dct_fully_shard_hook

__all__ = ["dct_fully_shard_hook"]
