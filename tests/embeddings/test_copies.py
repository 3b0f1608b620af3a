"""Copies of bags and layers share groups but not rows. Loading another rank's state raises."""

import copy
import io
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel

from dct_embeddings import (
    DynamicFeatureRows,
    EquivalentSubstitution,
    FeatureRows,
    LinearTerms,
    ReplicaSync,
    RowWiseAdagrad,
    ShardedEmbeddingBags,
    plan_shards,
)
from support.ranks import assert_same, on_ranks, shard_mesh, through_a_file
from wire_meter import WireMeter


@on_ranks(2)
def test_a_copy_of_bags_trains_without_their_sync(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    bags = ShardedEmbeddingBags([torch.ones(20, 4)], plan_shards([20], 1), mesh)
    optimizer = RowWiseAdagrad([bags.weight], lr=0.1)
    sync = ReplicaSync(bags, optimizer=optimizer)

    def train(bags, optimizer):
        bags(torch.arange(3) + 3 * rank, torch.ones(1, 3).long()).square().sum().backward()
        optimizer.step()

    train(bags, optimizer)
    mean = AveragedModel(bags)  # a copy before a sync, while rows are recorded as changed
    optimizer_of_mean = RowWiseAdagrad([mean.module.weight], lr=0.1)
    sync.step()
    assert_same(bags.weight)
    before = bags.weight.detach().clone()
    with WireMeter(mesh.get_group("replicate")) as meter:
        train(mean.module, optimizer_of_mean)
        train(*copy.deepcopy((bags, optimizer)))
        sync.step()
        assert meter.take() == 8  # no row has changed
    assert torch.equal(bags.weight, before) and not torch.equal(mean.module.weight, before)
    sync_of_copy = ReplicaSync(mean.module, optimizer=optimizer_of_mean)
    train(mean.module, optimizer_of_mean)
    sync_of_copy.step()
    assert_same(mean.module.weight[:6])
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a ReplicaSync must not be copied or pickled"):
            make(sync)


@on_ranks(2)
def test_a_copy_of_rows_keeps_its_features(rank):
    rows = DynamicFeatureRows(1, 20, bound=1.0)
    layer = EquivalentSubstitution(rows, [LinearTerms()])

    def look_up(layer, *ids):
        (result,) = layer(torch.tensor(ids), torch.ones(1, len(ids), dtype=torch.int64))
        result.sum().backward()
        return result.detach()

    before = look_up(layer, 1, 2, 3)
    averaged = AveragedModel(layer).module
    assert averaged.rows.group is rows.group is dist.group.WORLD
    torch.optim.SGD(layer.parameters(), 0.1).step()
    assert torch.equal(look_up(averaged, 1, 2, 3), before)
    assert not torch.equal(look_up(layer, 1, 2, 3), before)
    look_up(averaged, 6)
    found = torch.tensor([len(rows), len(averaged.rows)])
    dist.all_reduce(found)
    assert found.tolist() == [3, 4]


@on_ranks(1)
def test_saving_a_whole_module_raises(rank):
    """A file of a whole module could not be loaded in a process without the group."""
    layer = EquivalentSubstitution(FeatureRows(torch.ones(10, 3)), [LinearTerms()])
    for module, name in (
        (layer.rows, "FeatureRows"),
        (DynamicFeatureRows(1, 5), "DynamicFeatureRows"),
        (layer, "FeatureRows"),
        (AveragedModel(nn.Sequential(layer)), "FeatureRows"),
    ):
        text = f"dct::{name}: the saved object must be a state_dict(), got the module itself, "
        with pytest.raises(TypeError, match=re.escape(text)):
            torch.save(module, io.BytesIO())
        copy.deepcopy(module).load_state_dict(through_a_file(module.state_dict()))


@on_ranks(2)
def test_loading_the_state_of_a_different_rank_raises(rank):
    """Ranks have equal numbers of rows, so without this error, rows would be mixed up."""
    bags = ShardedEmbeddingBags([torch.randn(8, 3)], plan_shards([8], 2, [0]), shard_mesh(1, 2))
    rows = FeatureRows(torch.randn(10, 3))
    for module, name, identity in (
        (bags, "owned", lambda r: [[0, 4 * r, 4 * r + 4]]),
        (rows, "owner", lambda r: [r, 2, 10]),
    ):
        states, before = [None] * 2, module.weight.detach().clone()
        dist.all_gather_object(states, module.state_dict())
        own, text = states[rank], f"{name} of the state must be {identity(rank)}, as in this module"
        for state, got in (
            (states[1 - rank], identity(1 - rank)),
            (own | {name: torch.tensor([rank, 2])}, [rank, 2]),
        ):
            with pytest.raises(ValueError, match=re.escape(f"{text}, got {got}")):
                module.load_state_dict(state)
        assert torch.equal(module.weight, before)
        module.load_state_dict(own)
