"""Embedding tables in shards inside a group of ranks, the MLPs on all: hybrid parallelism, and 2D.

Hybrid is one group of all ranks. With several, each has a replica of the tables.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dct_embeddings import Shard, ShardedEmbeddingBags
from dct_parallel.rows.all_to_all import RowExchange

from .dlrm import DLRM


class ShardedDLRM(nn.Module):
    """A DLRM whose tables are `ShardedEmbeddingBags`, of one id each: same training, other traffic.

    A row that crosses is one embedding, of one sample and one table: in rows of several tables'
    embeddings side by side, DCT would pick those of tables that began large, and the others would
    never learn.

    Averaging the gradients of `mlps` is up to DistributedDataParallel, and the replicas to
    `ReplicaSync`. Gradients of tables are divided by the size of a group, as an average is, so that
    one learning rate fits both. Forward and backward are collective, with the same number of
    samples on every rank.

    Args:
        model: the whole DLRM, equal on every rank; what this rank does not own is dropped from it.
        plan: the shards of every rank of a group.
        exchange: of rows; may be replaced between steps, on all ranks.
        dedup: whether a row that several samples of a rank's batch ask for crosses once, and so
            does its gradient, their sum.
        replicas: groups of ranks.
        sparse: whether gradients of tables are, or dense, as those of the whole model.

    Attributes:
        tables: this rank's.
        mlps: of (integers, embeddings); to be wrapped.
        ids_group, rows_group, sync_group: what crosses by them can be told apart by its bytes.
    """

    def __init__(
        self,
        model: DLRM,
        plan: Sequence[Sequence[Shard]],
        exchange: RowExchange,
        dedup: bool = False,
        replicas: int = 1,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.exchange, self.replicas = exchange, replicas
        ranks = torch.arange(replicas * len(plan)).view(replicas, len(plan))
        # Not by init_device_mesh, which takes the group of all ranks where it fits: DDP's.
        self.sync_group = _group(ranks.t(), "sync")
        self.ids_group, self.rows_group = _group(ranks, "ids"), _group(ranks, "rows")
        mesh = DeviceMesh.from_group(
            [self.sync_group, self.ids_group],
            "cpu",
            mesh=ranks,
            mesh_dim_names=("replicate", "shard"),
        )

        def exchange_rows(x: Tensor, splits: list, output_splits: list, *, group) -> Tensor:
            return self.exchange(x, splits, output_splits, group=self.rows_group)

        tables = [table.weight for table in model.tables]
        self.tables = ShardedEmbeddingBags(
            tables, plan, mesh, exchange=exchange_rows, dedup=dedup, sparse=sparse
        )
        self.mlps = MLPs(model)

    def close(self) -> None:
        """End the process groups of the exchanges, on every rank: each has threads of its own."""
        for group in (self.sync_group, self.ids_group, self.rows_group):
            dist.destroy_process_group(group)

    def forward(self, ints: Tensor, ids: Tensor) -> Tensor:
        """Logits [batch] of integers float32 [batch, 13] and table rows int32 [batch, tables]."""
        columns = ids.t().contiguous()
        embedded = self.tables(columns.flatten(), torch.ones_like(columns))
        return self.mlps(ints, embedded)


class MLPs(nn.Module):
    """What every rank has: a DLRM without its tables, which is given their embeddings."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        del model.tables
        self.model = model

    def forward(self, ints: Tensor, embedded: Tensor) -> Tensor:
        return self.model.interact(ints, embedded)


def _group(rows: Tensor, name: str) -> dist.ProcessGroup:
    """Of the ranks in this rank's row."""
    own, _ = dist.new_subgroups_by_enumeration(rows.tolist(), group_desc=name)
    return own
