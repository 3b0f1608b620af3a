"""Distributed equivalent substitution: every rank with some rows of all tables, by their hash."""

import torch
import torch.distributed as dist
from torch import Tensor

from dct_embeddings import (
    DynamicFeatureRows,
    EquivalentSubstitution,
    FeatureRows,
    SumPooledEmbedding,
)

from ..errors import UsageError
from .dlrm import DLRM
from .factorised import FeatureModel, LocalOperators
from .sharded import MLPs


class SubstitutedModel(FeatureModel):
    """A model whose ranks share the rows of all tables: the same training, other traffic.

    Averaging the gradients of `dense` is up to DistributedDataParallel; those of tables need no
    exchange. Forward and backward are collective, with equally many samples on every rank.

    Args:
        model: the whole one, equal on every rank; what this rank does not own is dropped from it.
        dynamic_rows: of this rank at most, which appear in training, in the place of the model's;
            ids are names of values then. None: those of the model.
        seed: of rows that appear.

    Attributes:
        dense: to be wrapped.
        ids_group, rows_group: what crosses by them can be told apart by its bytes; by the second,
            partial results do.
    """

    def __init__(
        self, model: DLRM | FeatureModel, dynamic_rows: int | None = None, seed: int = 0
    ) -> None:
        whole = _as_feature_model(model) if isinstance(model, DLRM) else model
        ids_group, rows_group = (dist.new_group(group_desc=name) for name in ("ids", "rows"))
        weight, first = whole.tables.weight.detach(), whole.rows
        if dynamic_rows is None:
            rows = FeatureRows(weight, rows_group)
        else:
            first = [0] * len(first)  # names of different tables' values differ as they are
            rows = DynamicFeatureRows(weight.shape[1], dynamic_rows, seed=seed, group=rows_group)
        operators = list(whole.tables.operators)
        tables = EquivalentSubstitution(rows, operators, ids_group=ids_group)
        super().__init__(first, tables, whole.dense)
        self.ids_group, self.rows_group = ids_group, rows_group

    def forward(self, ints: Tensor, ids: Tensor) -> Tensor:
        try:
            return super().forward(ints, ids)
        except ValueError as error:
            if "capacity must" not in str(error):
                raise
            raise UsageError(f"--dynamic-rows must be enough for a rank: {error}") from None

    def close(self) -> None:
        """End the process groups of the exchanges, on every rank: each has threads of its own."""
        for group in (self.ids_group, self.rows_group):
            dist.destroy_process_group(group)


def _as_feature_model(model: DLRM) -> FeatureModel:
    rows = [table.num_embeddings for table in model.tables]
    weight = torch.cat([table.weight.detach() for table in model.tables])
    tables = LocalOperators(weight, [SumPooledEmbedding(weight.shape[1])])
    return FeatureModel(rows, tables, MLPs(model))
