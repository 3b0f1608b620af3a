"""Embedding tables in shards and replicas train like tables in one group of all ranks."""

import re
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_embeddings import (
    ReplicaSync,
    RowWiseAdagrad,
    Shard,
    ShardedEmbeddingBags,
    plan_shards,
)
from dct_embeddings.two_dimensional import embedding_bags
from dct_parallel import all_to_all_rows
from support.ranks import on_ranks, refused, shard_mesh
from wire_meter import WireMeter

ROWS, WIDTH, BATCH, LR = [10, 7, 4, 5], 3, 3, 0.5
ROW_WISE = [0, 2]  # with 4 ranks, table 2 has one row per rank


def _tables(dtype=torch.float64):
    """Values are small, like initial embeddings, so that 1e-6 is a few float32 rounding errors."""
    generator = torch.Generator().manual_seed(0)
    return [0.1 * torch.randn(rows, WIDTH, generator=generator).to(dtype) for rows in ROWS]


def _plan(shards):
    return plan_shards(ROWS, shards, ROW_WISE)


def _bags_of(step, rank):
    """(ids, lengths), with 0 to 3 ids per bag and repetitions."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(4, (len(ROWS), BATCH), generator=generator)
    counts = zip(ROWS, lengths.sum(1).tolist(), strict=True)
    ids = [torch.randint(rows, (count,), generator=generator) for rows, count in counts]
    return torch.cat(ids), lengths


def _pooled(tables, ids, lengths):
    """The oracle: F.embedding_bag for each table."""
    parts = []
    ids_by_table = ids.split(lengths.sum(1).tolist())
    for table, part, counts in zip(tables, ids_by_table, lengths, strict=True):
        parts.append(F.embedding_bag(part, table, counts.cumsum(0) - counts, mode="sum"))
    return torch.stack(parts, 1)


def _dense(dtype):
    torch.manual_seed(5)
    return nn.Linear(len(ROWS) * WIDTH, 1).to(dtype)


def _loss(embedded, dense):
    return dense(embedded.flatten(1)).sin().mean()


def _whole(bags):
    """All tables, gathered from the sharding group."""
    group = bags.mesh.get_group("shard")
    found = [None] * group.size()
    dist.all_gather_object(found, bags.shards(), group=group)
    rows_of_shards = {shard: rows for part in found for shard, rows in part.items()}
    return torch.cat([rows_of_shards[shard] for shard in sorted(rows_of_shards)])


def _trained(rank, mesh, optimizer_of, steps, dtype=torch.float64, syncing=True, **settings):
    """Bags and their optimizer, after training together with a dense part in DDP."""
    bags = ShardedEmbeddingBags(_tables(dtype), _plan(mesh["shard"].size()), mesh, **settings)
    dense = DDP(_dense(dtype))
    optimizer = optimizer_of([bags.weight])
    dense_optimizer = torch.optim.SGD(dense.parameters(), LR)
    sync = ReplicaSync(bags, optimizer=optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        dense_optimizer.zero_grad()
        _loss(bags(*_bags_of(step, rank)), dense).backward()
        optimizer.step()
        dense_optimizer.step()
        if syncing:
            sync.step()
    return bags, optimizer


def _train_alone(steps):
    """The oracle: the tables after SGD in one process, with the samples of all ranks."""
    tables, dense = [nn.Parameter(table) for table in _tables()], _dense(torch.float64)
    optimizer = torch.optim.SGD([*tables, *dense.parameters()], LR)
    for step in range(steps):
        optimizer.zero_grad()
        sum(_loss(_pooled(tables, *_bags_of(step, r)), dense) / 4 for r in range(4)).backward()
        optimizer.step()
    return torch.cat([table.detach() for table in tables])


def _sgd(params):
    return torch.optim.SGD(params, LR)


def _copies(bags, tensor):
    """`tensor` of each rank in this rank's replication group, in order."""
    group = bags.mesh.get_group("replicate")
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return parts


@on_ranks(4)
def test_sgd_on_a_2_by_2_mesh_equals_one_group_and_one_replica_needs_no_sync(rank):
    grid, one_group = shard_mesh(2, 2), shard_mesh(1, 4)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        ends = [_whole(_trained(rank, mesh, _sgd, 12, dtype)[0]) for mesh in (grid, one_group)]
        assert (ends[0] - torch.cat(_tables(dtype))).abs().max() > 0.1  # training has an effect
        assert (ends[0] - ends[1]).abs().max() < tolerance
        assert (ends[0].double() - _train_alone(12)).abs().max() < tolerance

    once = _trained(rank, grid, _sgd, 12, dedup=True)[0]
    dense = _trained(rank, grid, _sgd, 12, sparse=False)[0]
    assert once.weight.grad.is_sparse and not dense.weight.grad.is_sparse
    for bags in (once, dense):
        assert (_whole(bags) - _train_alone(12)).abs().max() < 1e-12

    ends = [
        _trained(rank, one_group, RowWiseAdagrad, 4, syncing=syncing) for syncing in (True, False)
    ]
    for of_end in (lambda bags, _: bags.weight, lambda bags, o: o.to_average(bags.weight)):
        assert torch.equal(*(of_end(bags, optimizer) for bags, optimizer in ends))


@on_ranks(4)
def test_quantized_rows_and_tables_of_the_first_replica(rank):
    mesh = shard_mesh(2, 2)
    # Quantized rows within the sharding group.
    exchange = partial(all_to_all_rows, format="int8")
    for dedup in (False, True):
        bags = ShardedEmbeddingBags(
            _tables(torch.float32), _plan(2), mesh, exchange=exchange, dedup=dedup
        )
        out = bags(*_bags_of(0, rank))
        expected = _pooled(_tables(torch.float32), *_bags_of(0, rank))
        assert 0 < (out - expected).abs().max() < 0.05
        out.sum().backward()
        assert bags.weight.grad.is_sparse

    # If replicas have different tables, all start with the tables of the first replica.
    tables = [table + rank for table in _tables()]
    replicas = _copies(bags, ShardedEmbeddingBags(tables, _plan(2), mesh).weight)
    assert torch.equal(*replicas)


PLAN = [[Shard(0, 0, 4)], [Shard(1, 0, 4)]]  # two tables of four rows, one table per rank
SHARDS = "dct::ShardedEmbeddingBags: "


def _two_tables():
    return [table[:4] for table in _tables()[:2]]


@on_ranks(2)
def test_wrong_plans_and_tables_raise(rank):
    mesh, two = shard_mesh(1, 2), _two_tables()
    for text, plan in (
        ("row of table 1 once, got rows 0 to 3 on no rank", [[(0, 0, 3)], [(0, 3, 4)]]),
        ("got rows 1 to 2 on rank 0", [[(0, 0, 3)], [(0, 1, 4), (1, 0, 4)]]),
        (r"plan\[1\]\[0\]\.end must be in \[1, 4\], got 5", [[(0, 0, 4)], [(1, 0, 5)]]),
        (r"plan\[1\] must have at least one shard", [PLAN[0], []]),
        ("plan must be the same on every rank, got .* on rank", PLAN[:: 1 - 2 * rank]),
    ):
        refused(SHARDS + ".*" + text, lambda plan=plan: ShardedEmbeddingBags(two, plan, mesh))
    flat, mixed = init_device_mesh("cpu", (2,)), [two[0], two[1].float()]
    for text, tables, changed in (
        ("mesh must have dimensions", two, {"mesh": flat}),
        (r"tables\[1\] must have width 3", mixed, {}),
        ("dedup must be the same on every rank, got False", two, {"dedup": rank == 1}),
    ):
        given = {"plan": PLAN, "mesh": mesh} | changed
        refused(text, lambda t=tables, g=given: ShardedEmbeddingBags(t, **g))


@on_ranks(2)
def test_wrong_settings_of_a_sync_raise(rank):
    mesh, two = shard_mesh(1, 2), _two_tables()
    wide = ShardedEmbeddingBags(two, PLAN, mesh)
    bags = ShardedEmbeddingBags([table.float() for table in two], PLAN, mesh)
    sgd, of_wide = (torch.optim.SGD([of.weight], LR) for of in (bags, wide))
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(1))], LR)
    momentum, decay = (
        torch.optim.SGD([bags.weight], LR, **{setting: 0.9})  # also change other rows
        for setting in ("momentum", "weight_decay")
    )
    few = "weight of bags, with a density or a quantized format, must be float32"
    for text, optimizer, settings, error in (
        ("every must be the same on .* 1 on rank 0, 2 on", sgd, {"every": 1 + rank}, ValueError),
        ("optimizer must be plain SGD,", momentum, {}, TypeError),
        ("optimizer must be plain SGD,", decay, {}, TypeError),
        ("optimizer must train the weight of bags", foreign, {}, ValueError),
        ("be 1 with format int8", sgd, {"density": 0.1, "format": "int8"}, ValueError),
        ("density must be the same on", sgd, {"density": 0.1 * (1 + rank)}, ValueError),
        ("format must be the same on", sgd, {"format": ["int8", "int4"][rank]}, ValueError),
        (few, of_wide, {"format": "int4"}, TypeError),
    ):
        given = {"optimizer": optimizer} | settings
        of = wide if optimizer is of_wide else bags
        refused(text, lambda of=of, given=given: ReplicaSync(of, **given), error)
    ReplicaSync(bags, optimizer=sgd)
    refused("one ReplicaSync only, got a second", lambda: ReplicaSync(bags, optimizer=sgd))


IDS, LENGTHS = torch.tensor([3, 0, 1]), torch.tensor([[1, 0], [0, 2]])


@on_ranks(2)
def test_rows_and_bytes_of_a_lookup(rank):
    mesh, two = shard_mesh(1, 2), _two_tables()
    bags = ShardedEmbeddingBags(iter(two), [tuple(map(tuple, part)) for part in PLAN], mesh)
    expected = torch.stack([two[0][3], torch.zeros(WIDTH), torch.zeros(WIDTH), two[1][:2].sum(0)])
    with WireMeter() as meter:
        out = bags(IDS, LENGTHS)
        # Sent: counts, bags and ids for the other rank, and pooled rows of that rank's samples.
        assert meter.take() == 32 + 4 * (2 + (2, 1)[rank]) + 2 * WIDTH * 8
    assert torch.equal(out.transpose(0, 1).flatten(0, 1), expected)
    once = ShardedEmbeddingBags(two, PLAN, mesh, dedup=True)
    often, of_often = torch.tensor([3, 3, 0, 0, 3, 1]), torch.tensor([[1, 1], [1, 3]])
    with WireMeter() as meter:
        out = once(often, of_often)
        # Sent: counts, distinct ids of the other rank's table, and rows for the other rank.
        assert meter.take() == 32 + 4 * (3, 1)[rank] + (1, 3)[rank] * WIDTH * 8
    bags_of_2 = [two[0][3], two[0][3], two[1][0], two[1][[0, 3, 1]].sum(0)]
    assert torch.allclose(out.transpose(0, 1).flatten(0, 1), torch.stack(bags_of_2), atol=1e-15)
    out.sum().backward()
    grad = once.weight.grad.coalesce()
    assert grad.indices().tolist() == ([[3]], [[0, 1, 3]])[rank]
    # The gradient is the mean over the ranks, as in DDP.
    assert torch.equal(grad.values()[:, 0], torch.tensor(([2.0], [2.0, 1.0, 1.0])[rank]).double())
    for of_bags in (bags, once):
        nothing = of_bags(IDS[:0].int(), LENGTHS[:, :0].contiguous())
        assert nothing.shape == (0, 2, WIDTH)
        nothing.sum().backward()
        assert of_bags(IDS, LENGTHS.int()).shape == (2, 2, WIDTH)


@on_ranks(2)
def test_wrong_ids_and_lengths_raise(rank):
    mesh = shard_mesh(1, 2)
    bags, once = (ShardedEmbeddingBags(_two_tables(), PLAN, mesh, dedup=d) for d in (False, True))
    largest = 2**63 - 1
    wraps = torch.tensor([[largest, largest], [2, 3]])
    turns = torch.tensor([[2**62, 2**62], [2**62, 2**62 + 3]])
    assert wraps.sum() == turns.sum() == len(IDS)  # in int64; the exact sums are larger by 2**64
    more, negative = torch.tensor([[4, 0], [0, 0]]).int(), torch.tensor([[2, 2], [-1, 0]])
    other, elements = "", "ids must have {} el"
    if rank == 1:
        other = "every rank must accept its input, got an error on rank 0: dct::ShardedEmb.*: "
    below = r"ids\[0\] must be in \[0, 3\], .* table 0, got -1"
    cases = [
        (r"ids\[1\] must be in \[0, 3\], the rows of table 1, got 4", [3, 4, 1], LENGTHS),
        (other + below, IDS - 4 * (rank == 0), LENGTHS),
        (other + elements.format(4), IDS, LENGTHS if rank else more),
        *((elements.format(int(long.double().sum())), IDS, long) for long in (wraps, turns, more)),
        ("lengths must be at least 0, got -1", IDS, negative),
        ("lengths must have 2 rows .one per table., got 1", IDS[:1], LENGTHS[:1]),
        ("batch must be the same on", IDS[: 3 - 2 * rank], LENGTHS[:, : 2 - rank].contiguous()),
    ]
    for text, ids, lengths in cases:
        for of_bags in (bags, once):
            ids = torch.as_tensor(ids)
            refused(text, lambda of=of_bags, i=ids, given=lengths: of(i, given))
    by_rank = embedding_bags.by_rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_bags, "MOST_ROWS", 2)
        refused("ids must have at most 2 elements, got 3", lambda: bags(IDS, LENGTHS))

    def wrong_lengths(*given):
        of_bags, names, _ = by_rank(*given)
        return [n + 1 for n in of_bags], names, [-1] * len(names)

    def equal_checksums(*given):  # the same checksum for all bags
        return (*by_rank(*given)[:2], [7] * 2)

    for wrong in (wrong_lengths, equal_checksums):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embedding_bags, "by_rank", wrong)
            refused(r"lengths of bags must sum to \[", lambda: bags(IDS, LENGTHS))
    assert bags(IDS, LENGTHS).shape == (2, 2, WIDTH)


@pytest.mark.parametrize("row_wise", [[], [3, 7]])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 13, 23, 24])
def test_a_plan_has_every_table_once_and_equally_many_per_rank(ranks, row_wise):
    rows = [int(2 ** (12 * (table * 7 % 26) / 26)) * 30 for table in range(26)]
    plan = plan_shards(rows, ranks, row_wise)
    whole = [[shard for shard in part if shard.table not in row_wise] for part in plan]
    assert sorted(table for part in whole for table, _, _ in part) == [
        table for table in range(26) if table not in row_wise
    ]
    counts = [len(part) for part in whole]
    assert max(counts) - min(counts) <= 1
    if ranks <= 4 and not row_wise:
        loads = [sum(end - first for _, first, end in part) for part in plan]
        assert max(loads) < 1.1 * sum(rows) / ranks


def test_plans_by_hand():
    # Largest first, each table goes to the rank with the fewest rows. Both ranks get two tables.
    plan = plan_shards([9, 1, 8, 7], 2)
    assert [[shard.table for shard in part] for part in plan] == [[0, 1], [2, 3]]
    assert plan_shards([5, 9, 2, 4], 2) == [
        [Shard(1, 0, 9), Shard(2, 0, 2)],
        [Shard(0, 0, 5), Shard(3, 0, 4)],
    ]
    assert plan_shards([7, 2], 3, row_wise=[0])[:2] == [
        [Shard(0, 0, 2), Shard(1, 0, 2)],
        [Shard(0, 2, 4)],
    ]
    with pytest.raises(ValueError, match=r"rows\[1\] must be at least 3, one for each rank, got 2"):
        plan_shards([7, 2], 3, row_wise=[1])
    with pytest.raises(ValueError, match=r"row_wise\[0\] must be in \[0, 1\], got 2"):
        plan_shards([7, 2], 1, [2])


PAGE = Path(__file__).parents[2] / "docs" / "guide" / "cluster.md"


@on_ranks(4)
def test_groups_have_the_timeout_of_the_guide(rank):
    section = PAGE.read_text().split("## Timeouts\n")[1]
    (block,) = re.findall(r"```\n(.*?)```\n", section.split("\n#")[0], re.DOTALL)
    names = {"torch": torch, "dist": dist}
    exec(block.replace('("node", "local")', '("replicate", "shard")'), names)
    mesh = names["mesh"]
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    for dimension in ("replicate", "shard"):
        backend = mesh.get_group(dimension)._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(minutes=2)
    bags = ShardedEmbeddingBags([torch.arange(8.0).view(4, 2)], plan_shards([4], 2, [0]), mesh)
    out = bags(torch.tensor([rank, 0]), torch.tensor([[1, 1]]))
    assert out.tolist() == [[[2.0 * rank, 2.0 * rank + 1]], [[0.0, 1.0]]]


@on_ranks(2, backend="cuda:gloo")
def test_tables_on_a_device_without_a_backend_in_the_default_group(rank):
    all_ranks, *groups = (dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [0], [1]))
    grid = torch.arange(2).view(2, 1)
    names = ("replicate", "shard")
    mesh = DeviceMesh.from_group([all_ranks, groups[rank]], "cpu", mesh=grid, mesh_dim_names=names)
    bags = ShardedEmbeddingBags([torch.arange(8.0).view(4, 2)], plan_shards([4], 1), mesh)
    assert bags(torch.tensor([rank]), torch.tensor([[1]])).tolist() == [
        [[2.0 * rank, 2 * rank + 1]]
    ]
