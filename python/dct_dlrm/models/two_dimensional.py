"""Two-dimensional parallelism: tables in shards inside a group of ranks, replicas across groups."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dct_embeddings import Shard, ShardedEmbeddingBags
from dct_parallel.rows.all_to_all import Exchange

from ..errors import UsageError
from .dlrm import DLRM
from .hybrid import MLPs


class TwoDimensionalDLRM(nn.Module):
    """A DLRM whose tables are `ShardedEmbeddingBags`, of one id each.

    With one replica bitwise a `HybridDLRM`; that is why gradients of tables are dense. Averaging
    the replicas is up to `ReplicaSync`, and the gradients of `mlps` to DistributedDataParallel.

    Args:
        model: the whole DLRM, equal on every rank; what this rank does not own is dropped from it.
        plan: the tables of every rank of a group.
        replicas: groups of ranks.
        exchange: of rows.
        dedup: whether a row that several samples of a rank's batch ask for crosses once.

    Attributes:
        tables: this rank's.
        mlps: of (integers, embeddings); to be wrapped.
        ids_group, rows_group, sync_group: what crosses by them can be told apart by its bytes.
    """

    def __init__(
        self,
        model: DLRM,
        plan: Sequence[Sequence[int]],
        replicas: int,
        exchange: Exchange,
        dedup: bool = False,
    ) -> None:
        super().__init__()
        ranks = torch.arange(replicas * len(plan)).view(replicas, len(plan))
        # Not by init_device_mesh, which takes the group of all ranks where it fits: DDP's.
        self.sync_group, _ = dist.new_subgroups_by_enumeration(ranks.t().tolist())
        self.ids_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
        self.rows_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
        mesh = DeviceMesh.from_group(
            [self.sync_group, self.ids_group],
            "cpu",
            mesh=ranks,
            mesh_dim_names=("replicate", "shard"),
        )

        def exchange_rows(x: Tensor, splits: list, output_splits: list, *, group) -> Tensor:
            return exchange(x, splits, output_splits, group=self.rows_group)

        tables = [table.weight for table in model.tables]
        shards = [[Shard(table, 0, len(tables[table])) for table in own] for own in plan]
        self.tables = ShardedEmbeddingBags(
            tables, shards, mesh, exchange_rows, dedup=dedup, sparse=False
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


def ranks_of_a_group(ranks: int, replicas: int) -> int:
    """How many ranks share a replica of the tables."""
    if ranks % replicas:
        raise UsageError(f"--replicas must divide the {ranks} ranks, got {replicas}")
    return ranks // replicas
