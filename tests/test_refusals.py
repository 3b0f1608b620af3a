"""One rank cannot make what all make together: the others are told, and all may try again."""

import re
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dct_embeddings import (
    DynamicFeatureRows,
    EquivalentSubstitution,
    FeatureRows,
    LinearTerms,
    ReplicaSync,
    ShardedEmbeddingBags,
    plan_shards,
)
from dct_parallel import DCTAverager, DCTState, dct_fully_shard_hook, dct_hook, node_mesh
from ranks import assert_same, batch, ddp, gathered, mlp, run_ranks, train_step, weights


def _bags(mesh, plan=None):
    plan = plan_shards([20, 8], 2) if plan is None else plan
    return ShardedEmbeddingBags([torch.ones(20, 4), torch.ones(8, 4)], plan, mesh)


def _cases():
    """(its name, what makes it, an argument that is wrong, what is said of that) of everything."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of DeviceMesh and FSDP themselves
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, rows = ddp(mlp()), FeatureRows(torch.zeros(10, 1))

    def state(**wrong):
        return DCTState(model, **wrong)

    def hook(**wrong):
        return dct_fully_shard_hook(fully_shard(mlp(), mesh=mesh["shard"]), mesh, **wrong)

    def sync(**wrong):
        bags = _bags(mesh)
        return ReplicaSync(bags, torch.optim.SGD([bags.weight], 0.1), **wrong)

    def dynamic(**wrong):
        return DynamicFeatureRows(**{"width": 1, "capacity": 5} | wrong)

    def layer(**wrong):
        return EquivalentSubstitution(rows, [LinearTerms()], **wrong)

    def nodes(**wrong):
        return node_mesh(**{"local_size": 2, "device_type": "cpu"} | wrong)

    return [
        ("DCTState", state, {"density": 0}, "density must be in (0, 1], got 0"),
        ("DCTState", state, {"mesh": 2}, "mesh must be a DeviceMesh, got int"),
        ("DCTAverager", lambda **a: DCTAverager(mlp(), **a), {"period": 0}, "period must be in"),
        (
            "dct_fully_shard_hook",
            hook,
            {"transport": "auto"},
            "transport must be None, 'all_gather' or 'reduce_scatter', got 'auto'",
        ),
        ("ShardedEmbeddingBags", lambda **a: _bags(mesh, **a), {"plan": []}, "plan must"),
        ("ReplicaSync", sync, {"every": 0}, "every must be in"),
        (
            "FeatureRows",
            lambda **a: FeatureRows(**{"weight": torch.zeros(10, 1)} | a),
            {"weight": torch.zeros(10)},
            "weight must be 2-D, got 1-D",
        ),
        ("DynamicFeatureRows", dynamic, {"capacity": 0}, "capacity must be in"),
        (
            "DynamicFeatureRows",
            dynamic,
            {"device": "x"},
            "device must be a torch.device or its name, got 'x'",
        ),
        ("EquivalentSubstitution", layer, {"ids_group": 3}, "group must be a process group"),
        ("node_mesh", nodes, {"local_size": 5}, "local_size must be in [1, 4], got 5"),
        (
            "node_mesh",
            nodes,
            {"device_type": "tpu"},
            "device_type must be cuda or cpu, got 'tpu'",
        ),
    ]


def _refused(rank):
    """Rank 1 refuses everything once; then it is made, on all ranks."""
    for op, make, wrong, text in _cases():
        text = re.escape(f"dct::{op}: {text}")
        if rank == 1:
            with pytest.raises((ValueError, TypeError), match=text):
                make(**wrong)
        else:
            start = f"dct::{op}: every rank must take part, got "
            with pytest.raises(RuntimeError, match=start + r"\w+Error from rank 1: " + text):
                make()
        make()
        assert torch.equal(torch.cat(gathered(torch.ones(1))), torch.ones(4)), op


def test_a_wrong_argument_of_one_rank_is_told_to_all_and_all_may_try_again():
    run_ranks(_refused, 4)


def _with_state(model, group):
    """What makes a state, and a step with it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def make():
        model.register_comm_hook(DCTState(model, 0.1, process_group=group), dct_hook)

    def steps():
        for step in range(4):
            train_step(model, optimizer, *batch(step, dist.get_rank()))

    return make, steps


def _with_averager(model, group):
    made = []

    def make():
        made.append(DCTAverager(model.module, period=1, process_group=group))

    @torch.no_grad()
    def steps():
        for parameter in model.parameters():
            parameter += dist.get_rank()
        made[0].average_parameters()

    return make, steps


def _silent(rank, front):
    """Rank 1 fails before it gets to the constructor: the others give up, then all try again."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    model, store = ddp(mlp()), dist.distributed_c10d._get_default_store()
    make, steps = front(model, group)
    if rank == 0:
        text = (
            "every rank must do the same within 3 s, got nothing from rank 1: see the output there"
        )
        with pytest.raises(RuntimeError, match=text):
            make()
        store.set("gave up", "")
    else:
        store.wait(["gave up"])
    make()
    steps()
    assert_same(weights(model))


@pytest.mark.parametrize("front", [_with_state, _with_averager])
def test_after_a_rank_failed_without_a_word_all_may_try_again(front):
    run_ranks(_silent, 2, front)
