"""Copies of bags that are averaged: for moving averages of weights, or to keep a model as it is."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel

from dct_embeddings import ReplicaSync, RowWiseAdagrad, ShardedEmbeddingBags, plan_shards
from ranks import assert_same, gathered, on_ranks, through_a_file
from wire_meter import WireMeter

ROWS, WIDTH = 20, 4


def _train(bags, optimizer, ids):
    optimizer.zero_grad()
    out = bags(ids, torch.ones(1, len(ids), dtype=torch.int64))
    out.square().sum().backward()
    optimizer.step()


@on_ranks(2)
def test_bags_that_are_averaged_can_be_copied(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    table = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(3) + 3 * rank
    one = torch.ones(1, 3, dtype=torch.int64)
    for copied in (
        copy.deepcopy,
        partial(through_a_file, weights_only=False),
        lambda bags: AveragedModel(bags).module,
    ):
        bags = ShardedEmbeddingBags([table], plan_shards([ROWS], 1), mesh)
        optimizer = RowWiseAdagrad([bags.weight], lr=0.1)
        sync = ReplicaSync(bags, optimizer=optimizer)
        _train(bags, optimizer, ids)
        other = copied(bags)  # before a sync: with rows that are noted
        assert torch.equal(other.weight, bags.weight)
        assert torch.equal(other(ids, one), bags(ids, one))
        for name in ("replicate", "shard"):
            assert other.mesh.get_group(name) is bags.mesh.get_group(name)
        before = other.weight.detach().clone()
        sync.step()
        assert_same(bags.weight)
        assert torch.equal(other.weight, before) and not torch.equal(*gathered(before))

        # The copy's steps are its own, and it may have a ReplicaSync of its own.
        own = RowWiseAdagrad([other.weight], lr=0.1)
        with WireMeter(mesh.get_group("replicate")) as meter:
            _train(other, own, ids)
            sync.step()
            assert meter.take() == 8  # that no row has changed
            sync_of_copy = ReplicaSync(other, optimizer=own)
            with torch.no_grad():
                other.weight.copy_(table)
            _train(other, own, ids)
            sync_of_copy.step()
            assert meter.take() > 8
        assert_same(other.weight)
        assert not torch.equal(other.weight[:6], bags.weight[:6])
        assert torch.equal(other.weight[6:], table[6:])

    # Both at once: the copied optimizer trains the copied bags, and tells no ReplicaSync.
    both, both_optimizer = copy.deepcopy((bags, optimizer))
    with WireMeter(mesh.get_group("replicate")) as meter:
        _train(both, both_optimizer, ids)
        sync.step()
        assert meter.take() == 8
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a ReplicaSync must not be copied or pickled"):
            make(sync)

    # A moving average of the weights, beside the training.
    mean = AveragedModel(bags)
    first = bags.weight.detach().clone()
    mean.update_parameters(bags)
    _train(bags, optimizer, ids)
    sync.step()
    mean.update_parameters(bags)
    assert torch.allclose(mean.module.weight, (first + bags.weight) / 2, rtol=0, atol=1e-6)
    assert_same(mean.module.weight)
