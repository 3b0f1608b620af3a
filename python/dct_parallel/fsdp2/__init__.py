"""Compression for fully_shard (FSDP2): between the shards of a model, and between replicas."""

from .replicas import dct_fully_shard_hook
from .shards import compress_fully_shard

__all__ = ["compress_fully_shard", "dct_fully_shard_hook"]
