"""Hybrid parallelism: every embedding table on one rank, the MLPs on all of them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_embeddings.distinct import distinct, repeat
from dct_parallel.collectives import all_to_all
from dct_parallel.rows.all_to_all import Exchange

from .dlrm import DLRM, look_up


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
        dedup: whether a row that several samples of a rank's batch ask for crosses once, and so
            does its gradient, their sum. How many they are goes ahead, 8 bytes for every table, and
            the host waits for it.

    Attributes:
        tables: this rank's.
        mlps: of (integers, embeddings); to be wrapped.
        counts_group, ids_group, rows_group: process groups of the exchanges, each with its own, so
            that their bytes can be told apart.
    """

    def __init__(
        self,
        model: DLRM,
        plan: Sequence[Sequence[int]],
        exchange: Exchange,
        dedup: bool = False,
    ) -> None:
        super().__init__()
        self.plan, self.exchange, self.dedup = plan, exchange, dedup
        self.tables = nn.ModuleList(model.tables[t] for t in plan[dist.get_rank()])
        self.mlps = MLPs(model)
        self.counts_group = dist.new_group(group_desc="counts")
        self.ids_group = dist.new_group(group_desc="ids")
        self.rows_group = dist.new_group(group_desc="rows")
        by_rank = torch.tensor([table for own in plan for table in own])
        self.register_buffer("_by_rank", by_rank, persistent=False)
        self.register_buffer("_order", by_rank.argsort(), persistent=False)

    def close(self) -> None:
        """End the process groups of the exchanges, on every rank: each has threads of its own."""
        for group in (self.counts_group, self.ids_group, self.rows_group):
            dist.destroy_process_group(group)

    def forward(self, ints: Tensor, ids: Tensor) -> Tensor:
        """Logits [batch] of integers float32 [batch, 13] and table rows int32 [batch, tables]."""
        return self.mlps(ints, self.embed(ids))

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [batch, tables, embedding_dim] of table rows [batch, tables]."""
        look_up_rows = self._distinct_rows if self.dedup else self._all_rows
        return look_up_rows(ids).index_select(1, self._order)

    def _all_rows(self, ids: Tensor) -> Tensor:
        """Embeddings of all tables, rank by rank: a row of every sample crosses."""
        batch, own, ranks = len(ids), len(self.tables), len(self.plan)
        sent = torch.cat([ids[:, list(tables)].flatten() for tables in self.plan])
        mine, theirs = [batch * own] * ranks, [batch * len(tables) for tables in self.plan]
        received = all_to_all(sent, theirs, mine, self.ids_group)
        embedded = self._for_mean(look_up(self.tables, received.view(-1, own)))
        rows = self.exchange(embedded.flatten(0, 1), mine, theirs, group=self.rows_group)
        by_rank = [part.view(batch, -1, rows.shape[1]) for part in rows.split(theirs)]
        return torch.cat(by_rank, dim=1)

    def _distinct_rows(self, ids: Tensor) -> Tensor:
        """The same: each distinct row crosses once."""
        own, ranks = len(self.tables), len(self.plan)
        tables = [len(tables) for tables in self.plan]
        places = torch.arange(sum(tables), device=ids.device)
        wanted, inverse, counts = distinct(ids.index_select(1, self._by_rank), places, len(places))
        asked = all_to_all(counts, tables, [own] * ranks, self.counts_group).tolist()
        theirs = [int(of_rank.sum()) for of_rank in counts.split(tables)]
        mine = [sum(asked[r * own : (r + 1) * own]) for r in range(ranks)]
        received = all_to_all(wanted, theirs, mine, self.ids_group).split(asked)
        embedded = torch.cat([self.tables[i % own](part) for i, part in enumerate(received)])
        rows = self.exchange(self._for_mean(embedded), mine, theirs, group=self.rows_group)
        return repeat(rows, inverse)

    def _for_mean(self, embedded: Tensor) -> Tensor:
        """Makes gradients of these, which are sums over ranks, means."""
        if embedded.requires_grad:
            embedded.register_hook(lambda grad: grad / len(self.plan))
        return embedded


class MLPs(nn.Module):
    """What every rank has: a DLRM without its tables, which is given their embeddings."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        del model.tables
        self.model = model

    def forward(self, ints: Tensor, embedded: Tensor) -> Tensor:
        return self.model.interact(ints, embedded)
