"""Embedding bags sharded over the ranks of a group, with replicas across groups."""

import contextlib
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks
from dct_parallel.collectives import all_to_all
from dct_parallel.groups import bit_sums, digest, sharing_errors
from dct_parallel.mesh import require_mesh
from dct_parallel.rows.all_to_all import RowExchange, whole_rows
from dct_parallel.rows.transfer import all_to_all_numbers

from ..bag_message import all_to_all_bags, by_rank, require_bags
from ..distinct import distinct, repeat
from ..groups import mesh_groups, require_same_in_mesh
from ..loading import CheckedModule
from .plan import MOST_ROWS, Shard, require_list, require_plan, row_count

DIMENSIONS = ("replicate", "shard")  # the mesh dimensions across replicas and inside a replica

_OP = "ShardedEmbeddingBags"
_Pairs = list[tuple[int, int]]


class ShardedEmbeddingBags(CheckedModule):
    """Embedding tables sharded over a group of ranks, with replicas across groups.

    The ranks of a mesh row own the tables together, table-wise or row-wise, and exchange pooled
    embeddings. The mesh rows are replicas, which `ReplicaSync` averages. A mesh with one row is
    plain model parallelism. Every rank passes the bags of its own samples. The number of samples is
    the same on every rank. Forward and backward are collective in the sharding group. Gradients are
    divided by the size of this group, as in a mean over the group's samples. The host waits for
    counts in forward, so CUDA graphs cannot capture it. The partial sums of a table's shards are
    added in a fixed order, so results are deterministic on the CPU. See docs/guide/embeddings.md.

    Do not wrap it in DistributedDataParallel, which would average different shards. `state_dict`
    contains this rank's rows and, as `owned`, [table, first, end] of each shard. Loading a state
    that does not match raises an error before anything is loaded. Copies (copy.deepcopy,
    AveragedModel) share the process groups of the mesh. A pickle of the module loads only on ranks
    that created the same groups.

    Args:
        tables: the weight of every table [rows, d], float32 or float64, with the same d and dtype
            for all, on the mesh's device type; not mutated. Only rows of this rank's shards are
            read, so tables may be mapped from files. Replicas start with the first replica's rows.
        plan: the shards of every rank of the sharding group, with each row of each table in one
            shard; see `plan_shards`.
        mesh: DeviceMesh with dimensions ("replicate", "shard"). The timeout of its groups bounds
            all waits.
        exchange: the exchange of rows, such as `functools.partial(all_to_all_rows, format="int8")`;
            default: uncompressed. Pass the same one on every rank; this is not checked.
        dedup: whether to send each distinct row once instead of pooled rows.
        sparse: whether the gradient of `weight` is sparse, as in nn.EmbeddingBag.

    Attributes:
        weight: parameter [local rows, d], this rank's shards in the order of its plan.
        loaded: a checksum of the weight of the last loaded state, or None. The next sync of a
            `ReplicaSync` compares it between replicas, and sets it to None.

    Raises:
        ValueError, TypeError: an argument is out of range.
        ValueError: ranks of the mesh differ in tables, plan or `dedup`. Every rank raises.
        RuntimeError: an argument is out of range on another rank.

    Source: two-dimensional sparse parallelism (arXiv 2508.03854).
    """

    identity = "owned"
    loaded: int | None = None
    _first: Tensor
    _shards: Tensor

    @checks.names_keywords
    def __init__(
        self,
        tables: Sequence[Tensor],
        plan: Sequence[Sequence[Shard]],
        mesh: DeviceMesh,
        *,
        exchange: RowExchange = whole_rows,
        dedup: bool = False,
        sparse: bool = True,
    ) -> None:
        super().__init__()
        with sharing_errors(_OP, *mesh_groups(mesh)):
            replicas, group = require_mesh(_OP, mesh, DIMENSIONS)
            tables = require_list(_OP, "tables", tables, "tensors")
            _require_tables(tables, mesh)
            rows = [len(table) for table in tables]
            plan = require_plan(_OP, plan, rows, group.size())
            if not callable(exchange):
                checks.fail(_OP, "exchange", "callable", checks.shown(exchange), TypeError)
            for name, flag in (("dedup", dedup), ("sparse", sparse)):
                checks.require_type(_OP, name, flag, bool, "a bool")
        shapes = digest((rows, tables[0].shape[1], tables[0].dtype))
        require_same_in_mesh(_OP, mesh, {"tables": shapes, "plan": digest(plan), "dedup": dedup})
        self.plan, self.mesh, self.exchange = plan, mesh, exchange
        self.dedup, self.sparse = dedup, sparse
        self._local = plan[group.rank()]
        parts = [tables[shard.table][shard.first : shard.end] for shard in self._local]
        self.weight = nn.Parameter(torch.cat([part.detach() for part in parts]))
        dist.broadcast(self.weight.detach(), group=replicas, group_src=0)
        self._index_rows(rows)
        owned = torch.tensor(self._local, dtype=torch.int64, device="cpu").view(-1, 3)
        self.register_buffer("owned", owned.to(self.weight.device))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *more: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *more)
        if f"{prefix}weight" in state_dict:
            (self.loaded,) = bit_sums([self.weight])

    def shards(self) -> dict[Shard, Tensor]:
        """Return this rank's shards [rows, d], as detached views of `weight`."""
        sizes = [shard.end - shard.first for shard in self._local]
        return dict(zip(self._local, self.weight.detach().split(sizes), strict=True))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the sums [batch, tables, d] of the rows in this rank's bags, 0 for empty bags.

        Args:
            ids: int32 or int64 [sum of lengths], rows of the tables: the bags of the first table,
                sample by sample, then the bags of the next table. At most 2 ** 31 - 1 elements.
            lengths: int32 or int64 [tables, batch], the number of ids in each bag. At most
                2 ** 31 - 1 elements.

        Raises:
            ValueError, TypeError: an argument is out of range on this rank. The other ranks of the
                group raise a ValueError with the same text.
            ValueError: batch, or whether gradients are enabled, differs between the ranks of the
                group. Every rank of the group raises.
            ValueError: received lengths do not add up to the received ids (without `dedup`).
        """
        try:
            self._require_bags(ids, lengths)
            batch = lengths.shape[1]
            bag, place, rows = self._locate(ids, lengths, batch)
        except (TypeError, ValueError) as error:
            with contextlib.suppress(ValueError):
                self._all_to_all_counts([(0, 0)] * len(self.plan), 0, error)
            raise
        if self.dedup:
            return self._distinct(place, rows, lengths)
        return self._pooled(bag, place, rows, batch)

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("shard")

    def _pooled(self, bag: Tensor, place: Tensor, rows: Tensor, batch: int) -> Tensor:
        """Owners sum their rows of each bag, and send one row per sample and shard."""
        bag_counts = [len(shards) * batch for shards in self.plan]
        lengths, wanted, common = by_rank(place * batch + bag % max(batch, 1), rows, bag_counts)
        counts = [(len(ids), size) for ids, size in zip(wanted, common, strict=True)]
        arriving = self._all_to_all_counts(counts, batch)
        local = all_to_all_bags(_OP, lengths, wanted, common, arriving, self._group)
        local_lengths, local_rows = local
        pooled = _sum_of_bags(self._look_up(local_rows), local_lengths)
        splits = [len(self._local) * batch] * len(arriving)
        received = self.exchange(pooled, splits, bag_counts, group=self._group)
        sums = received.view(self._shards.shape[1], batch, self.weight.shape[1])
        tables = [reduce(torch.add, [sums[place] for place in places]) for places in self._places]
        return torch.stack(tables, dim=1)

    def _distinct(self, place: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        """Owners send each distinct row of this rank's bags once, and this rank sums them."""
        wanted, inverse, per_shard = distinct(rows, place, self._shards.shape[1])
        per_rank = per_shard.split([len(shards) for shards in self.plan])
        splits = torch.stack([counts.sum() for counts in per_rank]).tolist()
        arriving = self._all_to_all_counts([(count, -1) for count in splits], lengths.shape[1])
        counts = [count for count, _ in arriving]
        local_rows = all_to_all(wanted, splits, counts, self._group)
        received = self.exchange(self._look_up(local_rows), counts, splits, group=self._group)
        bags = _sum_of_bags(repeat(received, inverse), lengths.flatten())
        return bags.view(*lengths.shape, self.weight.shape[1]).transpose(0, 1)

    def _look_up(self, rows: Tensor) -> Tensor:
        """Look up rows of `weight`, and divide their gradients by the number of ranks."""
        looked_up = F.embedding(rows, self.weight, sparse=self.sparse)
        if looked_up.requires_grad:
            looked_up.register_hook(lambda grad: grad / len(self.plan))
        return looked_up

    def _all_to_all_counts(
        self, counts: _Pairs, batch: int, error: Exception | None = None
    ) -> _Pairs:
        """Send counts[r] to rank r: the number of ids, and the length of every bag or -1.

        Returns the pairs from all ranks. If a rank passes an `error`, every rank raises.
        """
        settings = {"batch": batch, "gradients": torch.is_grad_enabled()}
        device, group = self.weight.device, self._group
        received = all_to_all_numbers(_OP, counts, settings, device, group, error)
        return [(count, common) for count, common in received]

    def _locate(self, ids: Tensor, lengths: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the bag of each id, the place of its shard, and its row in the owner's weight.

        `_index_rows` defines the place of a shard. The host waits, because this checks the ids.
        """
        bags = torch.arange(lengths.numel(), dtype=torch.int64, device=ids.device)
        bag = torch.repeat_interleave(bags, lengths.flatten(), output_size=len(ids))
        table = bag // max(batch, 1)
        unknown = ((ids < 0) | (ids >= self._first.diff()[table])).nonzero()
        if len(unknown):
            index = int(unknown[0])
            number, value = int(table[index]), int(ids[index])
            rule = f"in [0, {self._rows[number] - 1}], the rows of table {number}"
            checks.fail(_OP, f"ids[{index}]", rule, value)
        row = ids + self._first[table]
        start, place, inside = self._shards
        shard = torch.searchsorted(start, row, right=True) - 1
        return bag, place[shard], (row - start[shard] + inside[shard]).int()

    def _index_rows(self, rows: list[int]) -> None:
        """Register the buffers that map an id to its owner.

        The rows of all tables are numbered consecutively. For each shard, `_shards` contains its
        first row number, its place (its index in the plan, rank by rank), and its first row in the
        owner's weight. `_places` lists the places of each table in row order.
        """
        self._rows, first = rows, [0, *accumulate(rows)]
        shards = [shard for part in self.plan for shard in part]
        starts = [first[shard.table] + shard.first for shard in shards]
        inside = [row_count(part[:i]) for part in self.plan for i in range(len(part))]
        found = sorted(zip(starts, range(len(shards)), inside, strict=True))
        self._places = [[p for _, p, _ in found if shards[p].table == t] for t in range(len(rows))]
        by_row = torch.tensor(found, dtype=torch.int64, device=self.weight.device).t().contiguous()
        self.register_buffer("_first", by_row.new_tensor(first), persistent=False)
        self.register_buffer("_shards", by_row, persistent=False)

    def _require_bags(self, ids: Tensor, lengths: Tensor) -> None:
        require_bags(_OP, ids, lengths, self.weight)
        for arg, tensor in (("ids", ids), ("lengths", lengths)):  # counts are sent in 32 bits
            if tensor.numel() > MOST_ROWS:
                checks.fail(_OP, arg, f"at most {MOST_ROWS} elements", tensor.numel(), verb="have")
        if len(lengths) != len(self._rows):
            rule = f"{len(self._rows)} rows (one per table)"
            checks.fail(_OP, "lengths", rule, len(lengths), verb="have")


def _sum_of_bags(rows: Tensor, lengths: Tensor) -> Tensor:
    """Sum the rows of each bag, which are consecutive: [bags, d]."""
    # `unsafe` skips checks that synchronize with the host, and that fail if there are no bags.
    return torch.segment_reduce(rows, "sum", lengths=lengths.long(), initial=0.0, unsafe=True)


def _require_tables(tables: Sequence[Tensor], mesh: DeviceMesh) -> None:
    if len(tables) == 0:
        checks.fail(_OP, "tables", "at least one", "none", verb="have")
    for index, table in enumerate(tables):
        arg, first = f"tables[{index}]", tables[0]
        checks.require_type(_OP, arg, table, Tensor, "a tensor")
        checks.require_dtype(_OP, arg, table.dtype, (torch.float32, torch.float64))
        if table.dim() != 2 or not 1 <= len(table) <= MOST_ROWS or table.shape[1] == 0:
            rule = f"shape [rows, d] with rows in [1, {MOST_ROWS}] and d >= 1"
            checks.fail(_OP, arg, rule, tuple(table.shape), verb="have")
        if (table.shape[1], table.dtype) != (first.shape[1], first.dtype):
            rule = f"width {first.shape[1]} and dtype {first.dtype} like tables[0]"
            checks.fail(_OP, arg, rule, f"{table.shape[1]} and {table.dtype}", verb="have")
        if table.device.type != mesh.device_type:
            checks.fail(_OP, arg, f"on {mesh.device_type} like mesh", table.device)
