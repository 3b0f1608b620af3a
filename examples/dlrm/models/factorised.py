"""Logistic regression, a factorisation machine (Rendle, 2010) and DeepFM (arXiv 1703.04247).

Each is operators on the rows of a sample's features, and a dense part over their results.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dct_embeddings import FactorizationMachine, LinearTerms, SubstituteOperator, SumPooledEmbedding
from dct_embeddings.substitution.operators import Bags

from .mlp import layers


class LocalOperators(nn.Module):
    """Operators on rows that this process has, all of them; their gradient is dense.

    Args:
        weight: [features, d].
    """

    def __init__(self, weight: Tensor, operators: Sequence[SubstituteOperator]) -> None:
        super().__init__()
        self.weight, self.operators = nn.Parameter(weight), nn.ModuleList(operators)

    def forward(self, ids: Tensor, lengths: Tensor) -> list[Tensor]:
        """The result of every operator; called as `EquivalentSubstitution`."""
        rows, bags = F.embedding(ids, self.weight), Bags(lengths.unsqueeze(0))
        results = []
        for operator in self.operators:
            columns = rows.narrow(1, operator.first, operator.width)
            results.append(operator.combine(operator.partial(columns, bags)))
        return results


class FeatureModel(nn.Module):
    """Operators on the rows of all tables as one, and a dense part over integers and their results.

    Args:
        rows: of each table.
        tables: the operators: of (ids, lengths), as `EquivalentSubstitution` has them.
        dense: logits [batch] of (integers, *results).
    """

    def __init__(self, rows: Sequence[int], tables: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.rows, self.tables, self.dense = list(rows), tables, dense
        first = torch.tensor([0, *accumulate(rows)][:-1])
        self.register_buffer("_first", first.view(-1, 1, 1), persistent=False)

    def forward(self, ints: Tensor, ids: Tensor) -> Tensor:
        """Logits [batch] of integers [batch, n] and ids [batch, tables] or bags of them."""
        return self.dense(ints, *self.tables(*self._bags(ids)))

    def _bags(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of all tables as one, table by table and sample by sample, and how many in each."""
        by_table = (ids.unsqueeze(2) if ids.dim() == 2 else ids).transpose(0, 1)
        there = by_table >= 0
        return (by_table + self._first)[there], there.sum(2)


class _Shallow(nn.Module):
    """Adds up results that are one number a sample, and a linear function of the integers."""

    def __init__(self, ints: int) -> None:
        super().__init__()
        self.of_ints = nn.Linear(ints, 1)

    def forward(self, ints: Tensor, *results: Tensor) -> Tensor:
        return self.of_ints(ints).squeeze(1) + sum(results)


class _Deep(_Shallow):
    """The same, and an MLP over integers and pooled embeddings, which are the last result."""

    def __init__(self, ints: int, embeddings: int, hidden: Sequence[int]) -> None:
        super().__init__(ints)
        self.mlp = nn.Sequential(*layers([ints + embeddings, *hidden, 1])[:-1])

    def forward(self, ints: Tensor, *results: Tensor) -> Tensor:
        *shallow, pooled = results
        deep = self.mlp(torch.cat([ints, pooled.flatten(1)], dim=1))
        return super().forward(ints, *shallow) + deep.squeeze(1)


def logistic_regression(
    rows: Sequence[int], ints: int, embedding_dim: int, hidden: Sequence[int]
) -> FeatureModel:
    """A weight for each feature and integer, and a bias."""
    tables = LocalOperators(_initial(rows, 0), [LinearTerms()])
    return FeatureModel(rows, tables, _Shallow(ints))


def factorization_machine(
    rows: Sequence[int], ints: int, embedding_dim: int, hidden: Sequence[int]
) -> FeatureModel:
    """Logistic regression and the interactions of all pairs of features."""
    operators = [LinearTerms(), FactorizationMachine(embedding_dim, first=1)]
    tables = LocalOperators(_initial(rows, embedding_dim), operators)
    return FeatureModel(rows, tables, _Shallow(ints))


def deep_fm(
    rows: Sequence[int], ints: int, embedding_dim: int, hidden: Sequence[int]
) -> FeatureModel:
    """A factorisation machine and an MLP that share the features' embeddings."""
    operators = [
        LinearTerms(),
        FactorizationMachine(embedding_dim, first=1),
        SumPooledEmbedding(embedding_dim, first=1),
    ]
    tables = LocalOperators(_initial(rows, embedding_dim), operators)
    return FeatureModel(rows, tables, _Deep(ints, len(rows) * embedding_dim, hidden))


def _initial(rows: Sequence[int], embedding_dim: int) -> Tensor:
    """Rows of all tables: a weight of 0, and an embedding uniform within 1 / sqrt(rows)."""
    parts = []
    for count in rows:
        bound = math.sqrt(1 / count)
        embeddings = torch.empty(count, embedding_dim).uniform_(-bound, bound)
        parts.append(torch.cat([torch.zeros(count, 1), embeddings], dim=1))
    return torch.cat(parts)


# {name: made of rows of the tables, integers, width of an embedding, hidden widths of an MLP}.
FACTORISED: dict[str, Callable[[Sequence[int], int, int, Sequence[int]], FeatureModel]] = {
    "lr": logistic_regression,
    "fm": factorization_machine,
    "deepfm": deep_fm,
}
