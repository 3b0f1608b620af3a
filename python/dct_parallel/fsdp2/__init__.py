"""Gradients and weights of fully_shard (FSDP2): between shards, and between replicas of shards."""

from .compress import compress_fully_shard
from .hook import dct_fully_shard_hook

__all__ = ["compress_fully_shard", "dct_fully_shard_hook"]
