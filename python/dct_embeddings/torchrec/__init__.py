"""Adapters for TorchRec: its exchange of embeddings, its dense part, and its replicas of tables.

Only this folder imports torchrec, and no extra installs it: pip would replace torch.

Reading order: codecs (rows in few bits), dense (gradients by the hook), replicas (of
DMPCollection, by thresholded deltas).
"""

from .codecs import qcomm_codecs
from .dense import compress_dense
from .replicas import ReplicaDeltas, replica_sync

__all__ = ["ReplicaDeltas", "compress_dense", "qcomm_codecs", "replica_sync"]
