"""Embedding tables sharded inside a group of ranks, with replicas across groups.

Reading order: plan (who owns which rows), embedding_bags (the layer), row_wise_adagrad (its
optimizers), touched_rows (which rows change), averages (what replicas tell each other about those),
replica_sync (when).
"""

from .embedding_bags import ShardedEmbeddingBags
from .plan import Shard, plan_shards
from .replica_sync import ReplicaSync
from .row_wise_adagrad import MomentumScaledRowWiseAdagrad, RowWiseAdagrad

__all__ = [
    "MomentumScaledRowWiseAdagrad",
    "ReplicaSync",
    "RowWiseAdagrad",
    "Shard",
    "ShardedEmbeddingBags",
    "plan_shards",
]
