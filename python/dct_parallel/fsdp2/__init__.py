"""Compression for fully_shard (FSDP2): between the shards of a model, and between replicas."""

from .compress import compress_fully_shard
from .hook import dct_fully_shard_hook

__all__ = ["compress_fully_shard", "dct_fully_shard_hook"]
