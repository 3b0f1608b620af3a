"""Runs on ranks: split models compared with replicated ones, seeds, optimizers, errors."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm import loop, training
from dlrm.arguments import parse
from dlrm.data import dataset
from dlrm.errors import RankError, UsageError
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


def test_the_split_is_the_same_for_any_number_of_ranks(one_rank):
    numbers = np.arange(50_000)
    test, validation = dataset.split(numbers)
    assert test.mean() == pytest.approx(0.2, abs=0.01)
    assert validation.mean() == pytest.approx(0.1, abs=0.01) and not (test & validation).any()
    share = dataset.split(numbers[1::3])
    np.testing.assert_array_equal(share, (test[1::3], validation[1::3]))


FILES = {"rows": ["0" + "\t1" * 39] * 400, "junk": ["no row"] * 50}
REFUSED = [
    (["--rows", "150"], r"--rows must be enough for more than 2 steps .*, got 1 steps"),
    (["--rows", "1500", "--lr", "1e30"], r"--lr and .* got a loss of (nan|inf) in step \d"),
    (["--data", "some"], r"some must have at most 1% mal.* 5 of 405 lines malformed \(line 1"),
    (["--data", "junk"], r"junk must have a row in Criteo's layout, got 50 of 50 lines malformed"),
    (["--data", "rows"], r"the test rows must have labels 0 and 1, got 0 ones in \d+ rows"),
]


@pytest.mark.parametrize(("given", "text"), REFUSED)
def test_unusable_rows_and_rates_raise(one_rank, tmp_path, monkeypatch, given, text):
    monkeypatch.chdir(tmp_path)
    for name, lines in (FILES | {"some": FILES["junk"][:5] + FILES["rows"]}).items():
        (tmp_path / name).write_text("\n".join(lines))
    with pytest.raises(UsageError, match=text):
        _run(*given)


def _fail_on_rank_one(how):
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(7)
        raise UsageError("--rows must be odd") if how == "usage" else RuntimeError("no such luck")
    dist.barrier()  # rank 0 would block here


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("usage", UsageError, r"^--rows must be odd$"),
        ("fails", RankError, r"(?s)^rank 1 failed:.*_fail_on_rank_one.*Error: no such luck$"),
        ("dies", RankError, r"^rank 1 failed: process 1 terminated with exit code 7$"),
    ],
)
def test_a_failed_rank_ends_the_others(how, kind, text):
    with pytest.raises(kind, match=text):
        launch(_fail_on_rank_one, 2, how)


def test_different_weights_raise(monkeypatch):
    monkeypatch.setattr(training, "from_all_ranks", lambda value, group: ["a", value, "b"])
    with pytest.raises(RuntimeError, match=r"all ranks, got different ones on ranks \[2\]"):
        training.require_equal_weights("a")
