"""Hybrid parallelism: every embedding table on one rank, the MLPs on all of them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .dlrm import DLRM, look_up
from .row_exchange import Exchange, all_to_all


class HybridDLRM(nn.Module):
    """A DLRM whose tables are sharded over ranks: same logits, same training, other traffic.

    Rank r looks up its tables for the samples of all ranks and sends each rank its rows. A row is
    one embedding, of one sample and one table: in rows of several tables' embeddings side by side,
    DCT would pick those of tables that began large, and the others would never learn.

    Averaging the gradients of `mlps` is up to DistributedDataParallel; those of tables need no
    exchange. They are divided by the world size, as an average is, so that one learning rate fits
    both. Forward and backward are collective, with the same number of samples on every rank.

    Args:
        model: the whole DLRM, equal on every rank; what this rank does not own is dropped from it.
        plan: the tables of every rank.
        exchange: of rows; may be replaced between steps, on all ranks.

    Attributes:
        tables: this rank's.
        mlps: of (integers, embeddings); to be wrapped.
        ids_group, rows_group: process groups of the two exchanges, each with its own, so that their
            bytes can be told apart.
    """

    def __init__(self, model: DLRM, plan: Sequence[Sequence[int]], exchange: Exchange) -> None:
        super().__init__()
        self.plan, self.exchange = plan, exchange
        self.tables = nn.ModuleList(model.tables[t] for t in plan[dist.get_rank()])
        self.mlps = _MLPs(model)
        self.ids_group = dist.new_group(group_desc="ids")
        self.rows_group = dist.new_group(group_desc="rows")
        by_rank = torch.tensor([table for own in plan for table in own])
        self.register_buffer("_order", by_rank.argsort(), persistent=False)

    def forward(self, ints: Tensor, ids: Tensor) -> Tensor:
        """Logits [batch] of integers float32 [batch, 13] and table rows int32 [batch, tables]."""
        return self.mlps(ints, self.embed(ids))

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [batch, tables, embedding_dim] of table rows [batch, tables]."""
        batch, ranks = len(ids), len(self.plan)
        embedded = look_up(self.tables, self._own_ids(ids))
        if embedded.requires_grad:
            embedded.register_hook(lambda grad: grad / ranks)
        splits = [batch * len(self.tables)] * ranks
        output_splits = [batch * len(tables) for tables in self.plan]
        rows = self.exchange(embedded.flatten(0, 1), splits, output_splits, self.rows_group)
        by_rank = [part.view(batch, -1, rows.shape[1]) for part in rows.split(output_splits)]
        return torch.cat(by_rank, dim=1).index_select(1, self._order)

    def _own_ids(self, ids: Tensor) -> Tensor:
        """Rows of this rank's tables, for the samples of all ranks: [ranks * batch, own tables]."""
        batch, own = len(ids), len(self.tables)
        sent = torch.cat([ids[:, list(tables)].flatten() for tables in self.plan])
        splits = [batch * len(tables) for tables in self.plan]
        received = all_to_all(sent, splits, [batch * own] * len(self.plan), self.ids_group)
        return received.view(-1, own)


class _MLPs(nn.Module):
    """What every rank has: a DLRM without its tables, which is given their embeddings."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        del model.tables
        self.model = model

    def forward(self, ints: Tensor, embedded: Tensor) -> Tensor:
        return self.model.interact(ints, embedded)
