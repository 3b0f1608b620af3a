"""How often the host would wait for a CUDA device, as docs/design/layer.md lists it."""

from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import dct_embeddings
import dct_parallel
from dct_parallel import groups
from dct_parallel.rows.reduce_scatter import reduce_scatter_rows_async
from support.compressed_shards import loss_of, sharded
from support.ranks import batch, ddp, hooked, mlp, on_ranks, shard_mesh

# Ops that read the device's results on the host, and how often.
READS = dict.fromkeys(("_local_scalar_dense", "item", "is_nonzero", "equal"), 1)
READS |= {"nonzero": 1, "masked_select": 1, "_unique2": 1, "bincount": 2}


class Waits(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += READS.get(function._opname, 0)
        return function(*args, **(kwargs or {}))


def _waits(call):
    """The number of waits in a call on the CPU. Counts `tolist` and the ops in READS."""
    tolist, lists = torch.Tensor.tolist, []
    counting = lambda tensor: lists.append(1) or tolist(tensor)  # noqa: E731
    with Waits() as waits, mock.patch.object(torch.Tensor, "tolist", counting):
        call()
    return len(lists) + waits.number


@on_ranks(2)
def test_waits_of_the_host(rank):
    groups.require_same_order = lambda *_: None  # not called with CUDA
    mesh, replicas = shard_mesh(1, 2), shard_mesh(2, 1)
    model, _ = hooked(ddp(mlp()), density=0.1)
    gathered, half, reduced = sharded(), sharded(), sharded(mesh=replicas["shard"])
    states = [dct_parallel.compress_fully_shard(gathered, gradients="int4")]
    states.append(dct_parallel.compress_fully_shard(half, weights="bfloat16", gradients="bfloat16"))
    states.append(dct_parallel.dct_fully_shard_hook(reduced, mesh=replicas, density=0.1))
    x, splits, int8 = torch.randn(6, 64).requires_grad_(), [3, 3], dct_parallel.RowFormat("int8")
    calls = [
        lambda: model(batch(0, rank)[0]).sum().backward(),
        lambda: loss_of(gathered, 0, rank).backward(),
        lambda: loss_of(half, 0, rank).backward(),
        lambda: loss_of(reduced, 0, rank).backward(),  # also reads a comparison over gloo
        lambda: dct_parallel.all_reduce_compressed(torch.ones(9), format="int8"),
    ]
    for _ in range(4):  # earlier calls compare settings, and take dense steps
        waits = [_waits(call) for call in calls]
    assert waits == [1, 1, 1, 2, 1]

    def exchange(*arriving):
        dct_parallel.all_to_all_rows(x, splits, *arriving, format=int8).sum().backward()

    def add():
        group = dist.group.WORLD
        reduce_scatter_rows_async(x, splits, format=int8, group=group).wait().sum().backward()

    assert [_waits(exchange), _waits(lambda: exchange(splits)), _waits(add)] == [1, 0, 0]
    ids, lengths = torch.tensor([1, 8, 8, 4, 0]), torch.tensor([[1, 2], [0, 2]])
    tables, plan = [torch.ones(9, 8), torch.ones(5, 8)], dct_embeddings.plan_shards([9, 5], 2)
    for dedup in (False, True):
        bags = dct_embeddings.ShardedEmbeddingBags(tables, plan, mesh, dedup=dedup)
        assert _waits(lambda bags=bags: bags(ids, lengths).sum().backward()) == 5
