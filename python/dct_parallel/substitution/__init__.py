"""Distributed equivalent substitution: partial results cross, not the rows that they are made of.

Reading order: operators (what has such a substitute), feature_rows (who owns which row),
bag_message (ids to the owners of their rows), aggregation (partial results, added up),
substitution (the layer).
"""

from .feature_rows import FeatureRows
from .operators import (
    FactorizationMachine,
    FirstLayer,
    LinearTerms,
    SubstituteOperator,
    SumPooledEmbedding,
)
from .substitution import EquivalentSubstitution

__all__ = [
    "EquivalentSubstitution",
    "FactorizationMachine",
    "FeatureRows",
    "FirstLayer",
    "LinearTerms",
    "SubstituteOperator",
    "SumPooledEmbedding",
]
