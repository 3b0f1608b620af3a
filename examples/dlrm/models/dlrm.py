"""DLRM (Naumov et al., arXiv 1906.00091), in its configuration for Criteo Kaggle."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..data.features import INTS

BOTTOM, TOP = (512, 256, 64), (512, 256)  # hidden widths of the MLPs


class DLRM(nn.Module):
    """An MLP for integers, embeddings for categoricals, their dot products, and a top MLP.

    Embedding gradients are dense, so that DDP averages them like other gradients.

    Args:
        rows: number of rows of each embedding table.
        embedding_dim: width of an embedding, and of the bottom MLP's output.
        bottom: hidden widths of the bottom MLP, between the integers and `embedding_dim`.
        top: hidden widths of the top MLP, which has one output.

    Weights are drawn from torch's global generator. Linear: W ~ N(0, 2 / (in + out)),
    b ~ N(0, 1 / out). Embeddings: uniform in [-1 / sqrt(rows), 1 / sqrt(rows)].
    """

    def __init__(
        self, rows: Sequence[int], embedding_dim: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, embedding_dim) for n in rows)
        vectors = 1 + len(rows)
        interactions = vectors * (vectors - 1) // 2
        self.bottom = nn.Sequential(*layers([INTS, *bottom, embedding_dim]))
        self.top = nn.Sequential(*layers([embedding_dim + interactions, *top, 1])[:-1])
        below = torch.tril_indices(vectors, vectors, offset=-1)
        # Not a buffer, because DDP would broadcast a buffer in every step.
        self._pairs = below[0] * vectors + below[1]
        for table in self.tables:
            bound = math.sqrt(1 / table.num_embeddings)
            nn.init.uniform_(table.weight, -bound, bound)
        for layer in (*self.bottom, *self.top):
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=math.sqrt(2 / sum(layer.weight.shape)))
                nn.init.normal_(layer.bias, std=math.sqrt(1 / layer.out_features))

    def forward(self, ints: Tensor, ids: Tensor) -> Tensor:
        """Return logits [batch] for `ints` float32 [batch, 13], `ids` int32 [batch, tables]."""
        columns = ids.t().contiguous()
        embedded = [table(column) for table, column in zip(self.tables, columns, strict=True)]
        return self.interact(ints, torch.stack(embedded, dim=1))

    def interact(self, ints: Tensor, embedded: Tensor) -> Tensor:
        """Return logits [batch] for `ints` and `embedded` [batch, tables, embedding_dim]."""
        dense = self.bottom(ints)
        vectors = torch.cat([dense.unsqueeze(1), embedded], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        # One product per unordered pair of different vectors.
        pairs = products.index_select(1, self._pairs)
        return self.top(torch.cat([dense, pairs], dim=1)).squeeze(1)


def layers(widths: Sequence[int]) -> list[nn.Module]:
    """A Linear and a ReLU for each pair of consecutive widths."""
    made: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        made += [nn.Linear(width_in, width_out), nn.ReLU()]
    return made
