"""Split models train like replicated ones, and the loop like an optimizer of torch."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm import loop
from dlrm.arguments import parse
from dlrm.data import dataset
from dlrm.launch import launch
from dlrm.models.dlrm import BOTTOM, DLRM, TOP
from dlrm.scores import score

SMALL = ["--batch-size", "64", "--hash-size", "50", "--embedding-dim", "4"]


def _load(options):
    return dataset.load(options.data, options.rows, options.hash_size, options.batch_size)


def _run(*given, mode="dense", seed=0):
    options = parse([*SMALL, *map(str, given)])
    return loop.run(mode, seed, _load(options), options, lambda: None)


def _compare_runs():
    groups = set(dist.distributed_c10d._world.pg_map)
    rows = ("--rows", 3000)
    first, again, other = _run(*rows), _run(*rows), _run(*rows, seed=1)
    assert again.weights == first.weights != other.weights
    assert (again.record.loss == first.record.loss).all()
    # Split models differ from the replicated model only in the order of sums.
    float32 = ["--row-format", "float32", "--format", "float32", "--density", 1]
    for mode, given in (
        ("dense", ["hybrid"]),
        ("dense", ["hybrid", "--dedup"]),
        ("dct", ["hybrid", *float32]),
    ):
        cut = _run(*rows, "--parallel", *given, mode=mode)
        assert cut.record.loss[0] == pytest.approx(first.record.loss[0], rel=1e-7)
        np.testing.assert_allclose(cut.record.loss, first.record.loss, rtol=1e-5)
        assert cut.scores == pytest.approx(first.scores, rel=1e-4)
    rows = ("--rows", 20_000, "--lr", 0.3, "--embedding-lr", 0.3)
    for mode, given in (("dense", []), ("dct", ["--parallel", "hybrid", "--row-format", "int8"])):
        loss = _run(*rows, *given, mode=mode).record.loss
        assert np.isfinite(loss).all() and loss[-30:].mean() < 0.95 * loss[:30].mean(), mode
    assert set(dist.distributed_c10d._world.pg_map) == groups  # a leftover group keeps threads


def test_runs_of_two_ranks():
    launch(_compare_runs, 2)


def test_training_matches_an_optimizer_of_torch(one_rank):
    options = parse([*SMALL, "--rows", "600", "--lr", "0.003", "--embedding-lr", "0.1"])
    options.optimizer = "adamw"
    data = _load(options)
    result = loop.run("dense", 3, data, options, lambda: None)

    torch.manual_seed(3)
    model = DLRM(data.tables, 4, BOTTOM, TOP)
    tables = torch.optim.SGD(model.tables.parameters(), lr=0.1)
    mlps = torch.optim.AdamW([*model.bottom.parameters(), *model.top.parameters()], lr=0.003)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(3))
    losses = []
    for batch in map(data.train.take, order.split(64)[: len(order) // 64]):
        model.zero_grad()
        logits = model(batch.ints, batch.ids)
        losses.append(binary_cross_entropy_with_logits(logits, batch.labels.float()))
        losses[-1].backward()
        tables.step()
        mlps.step()
    assert len(losses) >= 5
    np.testing.assert_allclose(result.record.loss, [loss.item() for loss in losses], rtol=1e-5)
    probability = torch.sigmoid(model(data.test.ints, data.test.ids)).detach().numpy()
    assert result.scores == pytest.approx(score(data.test.labels.numpy(), probability), rel=1e-5)
