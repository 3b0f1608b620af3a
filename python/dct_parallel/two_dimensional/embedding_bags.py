"""Embedding bags whose rows are shared among the ranks of a group, with replicas across groups."""

import hashlib
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks

from ..rows.counts import exchange_counts
from .exchange import Exchange, whole_rows
from .mesh import require_mesh, require_same_in_mesh
from .plan import MOST_ROWS, Shard, require_plan, rows_of

_OP = "ShardedEmbeddingBags"
_INTS = (torch.int32, torch.int64)


class ShardedEmbeddingBags(nn.Module):
    """Embedding tables in shards over a group of ranks, of which there are replicas.

    Two-dimensional sparse parallelism (arXiv 2508.03854): the ranks of a row of the mesh own the
    tables together, table-wise or row-wise, and exchange pooled embeddings; the rows of the mesh
    hold replicas, which `ReplicaSync` averages. A mesh of one row is plain model parallelism.

    Every rank gives the bags of its own samples. Ids go to the ranks that own their rows; these add
    up what they own of a bag, and send that back: a row for every sample and shard. Sums of a
    table's shards are in row order. Gradients are divided by the size of the sharding group, as a
    mean over its samples is. With replicas averaged after every step, SGD does the same as with one
    group of all ranks.

    Forward and backward are collective in the sharding group, with equally many samples on every
    rank of it. The host waits in forward, for counts. Deterministic on the CPU.

    Keep it outside of DistributedDataParallel, which would average shards that are not the same.

    Args:
        tables: every table's weight [rows, d], float32 or float64, one d and dtype for all, on the
            mesh's kind of device. Only rows of this rank's shards are read: they may be mapped from
            files. Replicas start from those of the first.
        plan: the shards of every rank of the sharding group, see `plan_shards`; each row of each
            table once.
        mesh: DeviceMesh of dimensions ("replicate", "shard").
        exchange: of pooled rows, see `Exchange`; default as they are. For rows in few bits
            `functools.partial(all_to_all_rows, forward="int8", backward="int8")`. The same on every
            rank: it is not checked.

    Attributes:
        weight: parameter [own rows, d], this rank's shards in the order of its plan; its gradient
            is sparse.
        plan, mesh: as given.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
        ValueError: ranks of the mesh differ in tables or plan; on all of them.
    """

    def __init__(
        self,
        tables: Sequence[Tensor],
        plan: Sequence[Sequence[Shard]],
        mesh: DeviceMesh,
        exchange: Exchange = whole_rows,
    ) -> None:
        super().__init__()
        replicas, group = require_mesh(_OP, mesh)
        _require_tables(tables, mesh)
        rows = [len(table) for table in tables]
        plan = [[Shard(*shard) for shard in own] for own in plan]
        require_plan(_OP, plan, rows, group.size())
        told = {"tables": _digest(rows, tables[0].shape[1], tables[0].dtype), "plan": _digest(plan)}
        require_same_in_mesh(_OP, mesh, told)
        self.plan, self.mesh, self.exchange = plan, mesh, exchange
        self._own = plan[group.rank()]
        own = [tables[shard.table][shard.first : shard.end] for shard in self._own]
        self.weight = nn.Parameter(torch.cat([part.detach() for part in own]))
        dist.broadcast(self.weight.detach(), group=replicas, group_src=0)
        self._number_rows(rows)

    def shards(self) -> dict[Shard, Tensor]:
        """This rank's shards, [rows, d]: parts of `weight`."""
        sizes = [shard.end - shard.first for shard in self._own]
        return dict(zip(self._own, self.weight.detach().split(sizes), strict=True))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Sums [batch, tables, d] of the rows in this rank's bags; of an empty bag 0.

        Args:
            ids: int32 or int64 [sum of lengths], rows of the tables, bag after bag: those of the
                first table, sample by sample, then those of the next.
            lengths: int32 or int64 [tables, batch], how many ids are in each bag.

        Raises:
            ValueError, TypeError: an argument is out of its range here. The other ranks get an
                error when the group's timeout ends.
            ValueError: batch, or whether gradients are enabled, differs between the ranks of the
                group; on every rank of it.
        """
        self._require_bags(ids, lengths)
        group, batch = self.mesh.get_group("shard"), lengths.shape[1]
        bags, rows = self._received(*self._route(ids, lengths, batch), batch, group)
        starts = bags.cumsum(0, dtype=torch.int32) - bags
        pooled = F.embedding_bag(rows, self.weight, starts, mode="sum", sparse=True)
        if pooled.requires_grad:
            pooled.register_hook(lambda grad: grad / len(self.plan))
        theirs = [len(own) * batch for own in self.plan]
        mine = [len(self._own) * batch] * len(self.plan)
        arrived = self.exchange(pooled, mine, theirs, group=group)
        by_shard = arrived.view(len(self._shift), batch, self.weight.shape[1])
        return torch.stack([_sum_in_order(by_shard, of) for of in self._places], dim=1)

    def _received(
        self, message: Tensor, counts: list[int], batch: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """Lengths of bags and their ids, from all ranks: by source, own shard, sample."""
        must_match = {"batch": batch, "gradients": torch.is_grad_enabled()}
        asked = exchange_counts(_OP, counts, must_match, message.device, group)
        sent = [len(own) * batch + count for own, count in zip(self.plan, counts, strict=True)]
        own_bags = len(self._own) * batch
        heard = [own_bags + count for count in asked]
        received = message.new_empty(sum(heard))
        dist.all_to_all_single(received, message, heard, sent, group=group)
        parts = received.split([size for count in asked for size in (own_bags, count)])
        return torch.cat(parts[::2]), torch.cat(parts[1::2])

    def _route(self, ids: Tensor, lengths: Tensor, batch: int) -> tuple[Tensor, list[int]]:
        """What goes to each rank, one after the other, and how many ids are among it.

        For each rank the lengths of its bags, of every shard and sample, then their ids in it.
        """
        shards = len(self._shift)
        ends = lengths.flatten().cumsum(0)
        position = torch.arange(len(ids), device=ids.device)
        bag = torch.searchsorted(ends, position, right=True).clamp(max=max(len(ends) - 1, 0))
        table = bag // max(batch, 1)
        row = ids + self._first[table]
        known = (ids >= 0) & (ids < self._first.diff()[table])
        shard = (torch.searchsorted(self._start, row, right=True) - 1).clamp(min=0)
        place = torch.where(known, self._place[shard], shards)
        by_place = torch.bincount(place, minlength=shards + 1)
        least = lengths.min().view(1) if lengths.numel() else ends.new_zeros(1)
        total = lengths.sum().view(1)
        *counts, unknown, least, total = torch.cat([by_place, least, total]).tolist()
        if least < 0:
            checks.fail(_OP, "lengths", "0 and up", least)
        if total != len(ids):
            checks.fail(_OP, "ids", f"{total} elements like lengths", len(ids), verb="have")
        if unknown:
            worst = int((~known).nonzero()[0])
            number = int(table[worst])
            rule = f"from 0 to {self._rows[number] - 1} like rows of table {number}"
            checks.fail(_OP, f"ids[{worst}]", rule, int(ids[worst]))
        key = place * batch + bag % max(batch, 1)
        bags = torch.bincount(key, minlength=shards * batch).int()
        rows = (row + self._shift[shard])[key.argsort(stable=True)].int()
        per_rank = [sum(counts[low:high]) for low, high in self._places_of_rank]
        sizes = [(high - low) * batch for low, high in self._places_of_rank]
        parts = zip(bags.split(sizes), rows.split(per_rank), strict=True)
        return torch.cat([piece for pair in parts for piece in pair]), per_rank

    def _number_rows(self, rows: list[int]) -> None:
        """What finds an id's owner: the rows of all tables as one sequence, cut into shards.

        A shard's place is where it is in the plan, rank by rank.
        """
        self._rows = rows
        first = [0, *accumulate(rows)]
        ends = list(accumulate(len(own) for own in self.plan))
        self._places_of_rank = list(zip([0, *ends[:-1]], ends, strict=True))
        found = []  # (its start among all rows, its place, its start among its owner's rows)
        for (low, _), own in zip(self._places_of_rank, self.plan, strict=True):
            for index, shard in enumerate(own):
                found.append((first[shard.table] + shard.first, low + index, rows_of(own[:index])))
        found.sort()
        start, place, in_weight = zip(*found, strict=True)
        shift = [inside - outside for inside, outside in zip(in_weight, start, strict=True)]
        numbers = {"first": first, "start": start, "place": place, "shift": shift}
        for name, values in numbers.items():
            buffer = torch.tensor(values, device=self.weight.device)
            self.register_buffer(f"_{name}", buffer, persistent=False)
        self._places = [  # of every table, in row order
            [place for start, place, _ in found if low <= start < high]
            for low, high in pairwise(first)
        ]

    def _require_bags(self, ids: Tensor, lengths: Tensor) -> None:
        weight = ("weight", self.weight)
        checks.require_tensor(_OP, "ids", ids, _INTS, (1,), weight)
        checks.require_tensor(_OP, "lengths", lengths, _INTS, (2,), weight)
        if len(lengths) != len(self._rows):
            checks.fail(_OP, "lengths", f"{len(self._rows)} rows, one a table", len(lengths))


def _sum_in_order(parts: Tensor, indices: Sequence[int]) -> Tensor:
    """parts[i] of the indices, added from left to right."""
    total = parts[indices[0]]
    for index in indices[1:]:
        total = total + parts[index]
    return total


def _require_tables(tables: Sequence[Tensor], mesh: DeviceMesh) -> None:
    if len(tables) == 0:
        checks.fail(_OP, "tables", "at least one", "none", verb="have")
    for index, table in enumerate(tables):
        arg, first = f"tables[{index}]", tables[0]
        if not isinstance(table, Tensor):
            checks.fail(_OP, arg, "a tensor", type(table).__name__, TypeError)
        checks.require_dtype(_OP, arg, table.dtype, (torch.float32, torch.float64))
        if table.dim() != 2 or not 1 <= len(table) <= MOST_ROWS or table.shape[1] == 0:
            checks.fail(_OP, arg, "[rows, d] with both from 1 up", tuple(table.shape))
        if (table.shape[1], table.dtype) != (first.shape[1], first.dtype):
            rule = f"of width {first.shape[1]} and {first.dtype} like tables[0]"
            checks.fail(_OP, arg, rule, f"{table.shape[1]} and {table.dtype}")
        if table.device.type != mesh.device_type:
            checks.fail(_OP, arg, f"on {mesh.device_type} like mesh", table.device)


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]
