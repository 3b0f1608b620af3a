"""Adapters for TorchRec: its exchange of embeddings, its dense part, and its replicas of tables.

Only this folder imports torchrec. No extra of this package installs it, because pip would replace
torch.
"""

from .codecs import qcomm_codecs
from .dense import compress_dense
from .replicas import ReplicaDeltas, replica_sync

__all__ = ["ReplicaDeltas", "compress_dense", "qcomm_codecs", "replica_sync"]
