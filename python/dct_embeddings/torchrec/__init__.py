"""Adapters for TorchRec: its exchange of embeddings, its dense part, and its replicas of tables.

Only this folder imports torchrec. No extra of this package installs it, because pip would replace
torch.
"""

from .dense import compress_dense
from .replicas import ReplicaDeltas, replica_sync
from .sharders import compressed_sharders

__all__ = ["ReplicaDeltas", "compress_dense", "compressed_sharders", "replica_sync"]
