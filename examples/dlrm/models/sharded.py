"""A DLRM whose tables are sharded in one group of ranks, or in several groups with replicas."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dct_embeddings import Shard, ShardedEmbeddingBags
from dct_parallel.rows.all_to_all import RowExchange

from .dlrm import DLRM


class ShardedDLRM(nn.Module):
    """A DLRM whose tables are `ShardedEmbeddingBags`; the MLPs are on all ranks.

    Wrap `mlps` in DistributedDataParallel to average their gradients. Average replicas with
    `ReplicaSync`. Table gradients are divided by the group size, so that tables and MLPs can use
    one learning rate. Forward and backward are collective; all ranks pass equally many samples.

    Each row that is sent is one embedding of one table. If a row held embeddings of several tables,
    DCT would select entries of tables with large initial values. Other tables would never learn.

    Args:
        model: the whole DLRM, equal on all ranks.
        plan: the shards of each rank in a group.
        exchange: the function that exchanges rows.
        dedup: send a row, and the sum of its gradients, once per rank even if several samples of
            the batch use the row.
        replicas: number of groups, each with all tables.
        sparse: whether gradients of tables are sparse.

    Attributes:
        tables: the tables of this rank.
        mlps: a module that is called with (integers, embeddings).
        ids_group, rows_group, sync_group: a process group for each purpose.
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
        ranks = torch.arange(replicas * len(plan)).view(replicas, len(plan))
        # init_device_mesh would reuse the group of all ranks, which DDP uses.
        self.sync_group = _group(ranks.t(), "sync")
        self.ids_group, self.rows_group = _group(ranks, "ids"), _group(ranks, "rows")
        mesh = DeviceMesh.from_group(
            [self.sync_group, self.ids_group],
            "cpu",
            mesh=ranks,
            mesh_dim_names=("replicate", "shard"),
        )

        def exchange_rows(x: Tensor, splits: list, output_splits: list, *, group) -> Tensor:
            return exchange(x, splits, output_splits, group=self.rows_group)

        tables = [table.weight for table in model.tables]
        self.tables = ShardedEmbeddingBags(
            tables, plan, mesh, exchange=exchange_rows, dedup=dedup, sparse=sparse
        )
        self.mlps = MLPs(model)

    def close(self) -> None:
        """Destroy the process groups and their threads. Collective."""
        for group in (self.sync_group, self.ids_group, self.rows_group):
            dist.destroy_process_group(group)

    def forward(self, ints: Tensor, ids: Tensor) -> Tensor:
        """Return logits [batch] for `ints` float32 [batch, 13], `ids` int32 [batch, tables]."""
        columns = ids.t().contiguous()
        embedded = self.tables(columns.flatten(), torch.ones_like(columns))
        return self.mlps(ints, embedded)


class MLPs(nn.Module):
    """A DLRM without tables. It is called with integers and embeddings."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        del model.tables
        self.model = model

    def forward(self, ints: Tensor, embedded: Tensor) -> Tensor:
        return self.model.interact(ints, embedded)


def _group(rows: Tensor, name: str) -> dist.ProcessGroup:
    """Make a process group for each row of ranks. Return the group of this rank's row."""
    return dist.new_subgroups_by_enumeration(rows.tolist(), group_desc=name)[0]
