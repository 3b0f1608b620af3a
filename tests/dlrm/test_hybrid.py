"""Hybrid parallelism is the data-parallel training with other traffic; the plan; the exchanges."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from dct_embeddings import Shard, plan_shards
from dct_parallel import RowFormat
from dlrm import arguments, loop
from dlrm.data import dataset
from dlrm.launch import launch
from dlrm.models.dlrm import DLRM
from dlrm.models.row_exchange import EXCHANGES, rows_in
from dlrm.models.sharded import ShardedDLRM
from dlrm.parallel import describe

SMALL = ["--rows", "1500", "--batch-size", "64", "--hash-size", "50", "--embedding-dim", "4"]
SMALL += ["--bottom", "8", "--top", "32"]
BATCH = 12
ROWS = [40, 3, 7, 40, 5]  # five tables: no number of ranks divides them
DIM = 4


def test_the_plan_is_printed():
    plan = [[Shard(0, 0, 1000), Shard(2, 0, 300)], [Shard(1, 0, 20)]]
    assert describe(plan) == ("rank 0: 2 tables, 1,300 rows: 0 2\nrank 1: 1 tables, 20 rows: 1")


def _model():
    torch.manual_seed(3)
    return DLRM(ROWS, DIM, [6], [9])


def _samples(rank):
    generator = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randint(n, (BATCH,), generator=generator) for n in ROWS], 1)
    ints = torch.randn(BATCH, 13, generator=generator)
    return ints, ids.int(), torch.randint(2, (BATCH,), generator=generator).float()


def _loss(model, samples):
    ints, ids, labels = samples
    return binary_cross_entropy_with_logits(model(ints, ids), labels)


def _masked_model(density):
    """One process's model of all ranks' samples, that zeroes what an exchange leaves out."""

    class Masked(DLRM):
        def interact(self, ints, embedded):
            size = embedded.detach().abs()
            kept = size.argsort(dim=2, descending=True, stable=True)[..., : int(density * DIM)]
            return super().interact(ints, embedded * torch.zeros_like(size).scatter(2, kept, 1))

    torch.manual_seed(3)
    return Masked(ROWS, DIM, [6], [9])


def _against_one_process(folder):
    """Logits and the gradients of all weights, against one model that sees all samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = plan_shards(ROWS, ranks)
    for density, exchange, dedup in (
        (1.0, rows_in("float32"), False),
        (1.0, rows_in("float32"), True),
        (1.0, rows_in(RowFormat("float32", density=1.0)), False),
        (0.5, rows_in(RowFormat("float32", density=0.5)), True),
    ):
        whole = _masked_model(density)
        reference = torch.stack([_loss(whole, _samples(r)) for r in range(ranks)]).mean()
        reference.backward()
        model = ShardedDLRM(_model(), plan, exchange, dedup)
        samples = _samples(rank)
        torch.testing.assert_close(model(*samples[:2]), whole(*samples[:2]))
        _loss(model, samples).backward()
        own = torch.cat([whole.tables[shard.table].weight.grad for shard in plan[rank]])
        assert own.any()
        torch.testing.assert_close(model.tables.weight.grad, own)
        for layers, replicated in ((whole.bottom, "bottom"), (whole.top, "top")):
            for expected, weight in zip(
                layers.parameters(), getattr(model.mlps.model, replicated).parameters(), strict=True
            ):
                dist.all_reduce(weight.grad)  # what DDP does
                torch.testing.assert_close(weight.grad / ranks, expected.grad)
    Path(folder, f"done{rank}").touch()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.large), 2, 3])
def test_logits_and_gradients_are_those_of_one_process(ranks):
    with tempfile.TemporaryDirectory() as folder:
        launch(_against_one_process, ranks, folder)
        assert len(list(Path(folder).iterdir())) == ranks


def _train(path, extra, format):
    """What rank 0 has of a run, written to path."""
    if format is not None:
        EXCHANGES["dense"] = lambda options: rows_in(format)
    options = arguments.parse([*SMALL, *extra])
    result = loop.run("dense", 0, dataset.load(options), options, lambda loss: None)
    if dist.get_rank() == 0:
        torch.save((torch.from_numpy(result.loss), result.auc, result.log_loss), path)


def _trained(tmp_path, *extra, format=None):
    launch(_train, 2, tmp_path / "result", extra, format)
    return torch.load(tmp_path / "result")


def test_dense_hybrid_training_is_data_parallel_training(tmp_path):
    """Sums of a table's gradients differ in their order, nothing else does."""
    many = ("--epochs", "3", "--modes", "dense")
    loss, auc, log_loss = _trained(tmp_path, *many)
    hybrid_loss, *hybrid_scores = _trained(tmp_path, *many, "--parallel", "hybrid")
    assert len(loss) == 27 and loss[0] != loss[-1]
    assert hybrid_loss[0] == loss[0]
    torch.testing.assert_close(hybrid_loss, loss, rtol=1e-5, atol=0)
    assert hybrid_scores == pytest.approx([auc, log_loss], rel=1e-4)


def test_distinct_rows_train_as_all_rows_do(tmp_path):
    """Sums of a row's gradients differ in their order, nothing else does."""
    hybrid = ("--epochs", "3", "--modes", "dense", "--parallel", "hybrid")
    loss, *scores = _trained(tmp_path, *hybrid)
    distinct_loss, *distinct_scores = _trained(tmp_path, *hybrid, "--dedup")
    assert distinct_loss[0] == loss[0]
    torch.testing.assert_close(distinct_loss, loss, rtol=1e-5, atol=0)
    assert distinct_scores == pytest.approx(scores, rel=1e-4)


@pytest.mark.large
def test_density_one_in_float32_is_the_dense_exchange_bit_for_bit(tmp_path):
    hybrid = ("--parallel", "hybrid", "--modes", "dense")
    loss, *scores = _trained(tmp_path, *hybrid)
    packed_loss, *packed_scores = _trained(
        tmp_path, *hybrid, format=RowFormat("float32", density=1.0)
    )
    assert torch.equal(loss, packed_loss) and scores == packed_scores
