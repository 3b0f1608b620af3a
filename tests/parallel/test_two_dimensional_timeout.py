"""The timeout of a mesh's groups, as docs/cluster.md sets it."""

import re
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dct_parallel import ShardedEmbeddingBags, plan_shards
from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"


def _as_documented(rank):
    section = PAGE.read_text().split("## Timeouts\n")[1]
    (block,) = re.findall(r"```\n(.*?)```\n", section.split("\n#")[0], re.DOTALL)
    names = {"torch": torch, "dist": dist, "replicas": 2}
    exec(block, names)
    mesh = names["mesh"]
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    for dimension in ("replicate", "shard"):
        backend = mesh.get_group(dimension)._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(minutes=2)
    bags = ShardedEmbeddingBags([torch.arange(8.0).view(4, 2)], plan_shards([4], 2, [0]), mesh)
    out = bags(torch.tensor([rank, 0]), torch.tensor([[1, 1]]))
    assert out.tolist() == [[[2.0 * rank, 2.0 * rank + 1]], [[0.0, 1.0]]]


def test_groups_have_the_timeout_that_they_are_given():
    run_ranks(_as_documented, 4)
