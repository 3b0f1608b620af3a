"""The timeout that docs/guide/cluster.md sets for the groups of a mesh, and their backend."""

import re
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dct_embeddings import ShardedEmbeddingBags, plan_shards
from support.ranks import on_ranks

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
