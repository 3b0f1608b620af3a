"""Adapters for TorchRec: exchanges of embeddings, the dense part, and replicas of tables.

Only this folder imports torchrec. The package has no extra that installs TorchRec, because pip
would then replace torch.
"""

from .dense import compress_dense
from .replicas import ReplicaDeltas, replica_sync
from .sharders import compressed_sharders

__all__ = ["ReplicaDeltas", "compress_dense", "compressed_sharders", "replica_sync"]
