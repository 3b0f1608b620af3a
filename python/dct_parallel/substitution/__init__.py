"""Distributed equivalent substitution: partial results cross, not the rows that they are made of.

Reading order: operators (what has such a substitute), feature_rows (who owns which row), id_table
and dynamic_rows (rows that appear in training), dynamic_state (what is saved of them), aggregation
(partial results, added up), substitution (the layer).
"""

from .dynamic_rows import DynamicFeatureRows
from .dynamic_state import merge_feature_rows
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
    "DynamicFeatureRows",
    "EquivalentSubstitution",
    "FactorizationMachine",
    "FeatureRows",
    "FirstLayer",
    "LinearTerms",
    "SubstituteOperator",
    "SumPooledEmbedding",
    "merge_feature_rows",
]
