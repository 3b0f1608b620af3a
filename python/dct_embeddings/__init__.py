"""dct_embeddings: embedding tables that do not fit on one rank.

Tables sharded inside a group of ranks, with replicas across groups:

    bags = ShardedEmbeddingBags(tables, plan_shards(rows, ranks), mesh)
    optimizer = MomentumScaledRowWiseAdagrad([bags.weight], scale=replicas)
    sync = ReplicaSync(bags, optimizer=optimizer, every=10)

Operators that ranks compute on the rows that they own, so that only partial results are sent:

    layer = EquivalentSubstitution(FeatureRows(weight), [LinearTerms(), SumPooledEmbedding(16, 1)])
    linear, pooled = layer(ids, lengths)

Three folders do not import each other: two_dimensional (shards and replicas), substitution (partial
results of operators) and torchrec (adapters, if TorchRec is installed).
"""

from .row_wise_adagrad import MomentumScaledRowWiseAdagrad, RowWiseAdagrad
from .substitution.dynamic_rows import DynamicFeatureRows
from .substitution.dynamic_state import merge_feature_rows
from .substitution.feature_rows import FeatureRows
from .substitution.operators import (
    FactorizationMachine,
    FirstLayer,
    LinearTerms,
    SubstituteOperator,
    SumPooledEmbedding,
)
from .substitution.substitution import EquivalentSubstitution
from .two_dimensional.embedding_bags import ShardedEmbeddingBags
from .two_dimensional.plan import Shard, plan_shards
from .two_dimensional.replica_sync import ReplicaSync

__all__ = [
    "DynamicFeatureRows",
    "EquivalentSubstitution",
    "FactorizationMachine",
    "FeatureRows",
    "FirstLayer",
    "LinearTerms",
    "MomentumScaledRowWiseAdagrad",
    "ReplicaSync",
    "RowWiseAdagrad",
    "Shard",
    "ShardedEmbeddingBags",
    "SubstituteOperator",
    "SumPooledEmbedding",
    "merge_feature_rows",
    "plan_shards",
]


def __dir__() -> list[str]:
    return __all__
