"""If a collective constructor fails on one rank, the other ranks raise immediately."""

import re
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dct_embeddings import (
    DynamicFeatureRows,
    EquivalentSubstitution,
    FeatureRows,
    LinearTerms,
    ReplicaSync,
    ShardedEmbeddingBags,
    plan_shards,
)
from dct_parallel import (
    DCTAverager,
    DCTState,
    compress_fully_shard,
    dct_fully_shard_hook,
    node_mesh,
)
from dct_parallel.groups import PeerError
from support.ranks import ddp, gathered, mlp, on_ranks


def _bags(mesh, plan=None):
    plan = plan_shards([20, 8], 2) if plan is None else plan
    return ShardedEmbeddingBags([torch.ones(20, 4), torch.ones(8, 4)], plan, mesh)


def _cases():
    """(name, constructor, wrong argument, error text) for every collective constructor."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # from DeviceMesh and FSDP
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, rows = ddp(mlp()), FeatureRows(torch.zeros(10, 1))

    def state(ddp=model, **wrong):
        return DCTState(ddp, **wrong)

    def shards(**wrong):  # on a mesh of two dimensions
        compress_fully_shard(fully_shard(mlp(), mesh=mesh), **wrong).close()

    def hook(**wrong):
        return dct_fully_shard_hook(fully_shard(mlp(), mesh=mesh["shard"]), mesh=mesh, **wrong)

    def sync(**wrong):
        bags = _bags(mesh)
        optimizer = torch.optim.SGD([bags.weight], 0.1)
        return ReplicaSync(**{"bags": bags, "optimizer": optimizer} | wrong)

    def features(**wrong):
        return FeatureRows(**{"weight": torch.zeros(10, 1)} | wrong)

    def dynamic(**wrong):
        return DynamicFeatureRows(**{"width": 1, "capacity": 5} | wrong)

    def layer(**wrong):
        return EquivalentSubstitution(**{"rows": rows, "operators": [LinearTerms()]} | wrong)

    def nodes(**wrong):
        return node_mesh(**{"local_size": 2, "device_type": "cpu"} | wrong)

    device = "device must be a torch.device or its name"
    group = "must be a process group that this rank is in, got 5"
    ways = "transport must be None, 'all_gather' or 'reduce_scatter'"
    return [
        ("DCTState", state, {"density": 0}, "density must be in (0, 1], got 0"),
        ("DCTState", state, {"mesh": 2}, "mesh must be a DeviceMesh, got 2"),
        ("DCTState", state, {"ddp": model.module}, "ddp must be a DistributedDataParallel"),
        ("DCTState", state, {"process_group": 5}, f"process_group {group}"),
        ("DCTAverager", lambda **a: DCTAverager(mlp(), **a), {"process_group": 5}, "process_group"),
        ("compress_fully_shard", shards, {"weights": "int4"}, "weights must be 'float32', "),
        ("DCTAverager", lambda **a: DCTAverager(mlp(), **a), {"period": 0}, "period must be in"),
        ("dct_fully_shard_hook", hook, {"transport": "auto"}, f"{ways}, got 'auto'"),
        ("ShardedEmbeddingBags", lambda **a: _bags(mesh, **a), {"plan": []}, "plan must"),
        ("ShardedEmbeddingBags", lambda **a: _bags(**{"mesh": mesh} | a), {"mesh": 5}, "mesh must"),
        ("ReplicaSync", sync, {"every": 0}, "every must be in"),
        ("ReplicaSync", sync, {"bags": 5}, "bags must be ShardedEmbeddingBags, got 5"),
        ("FeatureRows", features, {"weight": torch.zeros(10)}, "weight must be 2-D, got 1-D"),
        ("FeatureRows", features, {"group": 5}, f"group {group}"),
        ("DynamicFeatureRows", dynamic, {"capacity": 0}, "capacity must be in"),
        ("DynamicFeatureRows", dynamic, {"device": "x"}, f"{device}, got 'x'"),
        ("EquivalentSubstitution", layer, {"ids_group": 3}, "ids_group must be a process group"),
        ("EquivalentSubstitution", layer, {"rows": 5}, "rows must be FeatureRows or"),
        ("node_mesh", nodes, {"local_size": 5}, "local_size must be in [1, 4], got 5"),
        (
            "node_mesh",
            nodes,
            {"device_type": "tpu"},
            "device_type must be 'cuda' or 'cpu', got 'tpu'",
        ),
    ]


def _refused(op, make, wrong, text, everywhere):
    """Rank 1 or all ranks pass a wrong argument. The next call works again."""
    text = re.escape(f"dct::{op}: {text}")
    if dist.get_rank() == 1 or everywhere:
        with pytest.raises((ValueError, TypeError), match=text):
            make(**wrong)
    else:
        start = f"dct::{op}: every rank must take part, got "
        with pytest.raises(PeerError, match=start + r"\w+Error from rank 1: " + text):
            make()
    make()
    assert torch.equal(torch.cat(gathered(torch.ones(1))), torch.ones(4)), op


@on_ranks(4)
def test_a_wrong_argument_raises_on_every_rank_and_the_next_call_works(rank):
    for case in _cases():
        _refused(*case, everywhere=True)
        _refused(*case, everywhere=False)


@on_ranks(2)
def test_the_other_rank_raises_at_the_timeout_if_one_does_not_call_the_constructor(rank):
    model, store = ddp(mlp()), dist.distributed_c10d._get_default_store()
    groups = [dist.new_group(timeout=timedelta(seconds=1)) for _ in range(2)]
    if rank == 1:
        store.wait(["gave up"])
        return
    text = "every rank must do the same within 1 s, got nothing from rank 1: see the output there"
    with pytest.raises(PeerError, match=text):
        DCTState(model, density=0.1, process_group=groups[0])
    with pytest.raises(PeerError, match=text):
        DCTAverager(model.module, period=1, process_group=groups[1])
    store.set("gave up", "")


def test_errors_about_wrong_models_name_the_right_function(one_rank):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    sharded, wrapped = fully_shard(mlp(), mesh=mesh["shard"]), DistributedDataParallel(mlp())
    for call, text in (
        (lambda: DCTState(sharded), "ddp must be .* fully_shard .*, use dct_fully_shard_hook"),
        (lambda: DCTState(mlp()), "ddp must be .*.wrap the module in one first., got Sequential"),
        (lambda: DCTState(5), "ddp must be a DistributedDataParallel, got 5"),
        (lambda: dct_fully_shard_hook(wrapped, mesh=mesh), "for a DDP module, register dct_hook"),
        (lambda: dct_fully_shard_hook(None, mesh=mesh), "model must be .*, got None"),
    ):
        with pytest.raises(TypeError, match=text):
            call()
