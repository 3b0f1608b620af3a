"""train_dlrm.py --parallel des: data-parallel training with other traffic; LR, FM, DeepFM, DLRM."""

import json
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dlrm import arguments, loop
from dlrm.data import dataset
from dlrm.data.features import EMPTY, MISSING, name_values
from dlrm.launch import launch
from dlrm.train import main

BATCH, DIM, TABLES = 64, 8, 26
PURPOSES = ("ids", "mp_forward", "mp_backward", "dp")
SMALL = ["--batch-size", str(BATCH), "--modes", "dense"]
TABLES_OF_50, WIDE, TOP = ["--hash-size", "50"], ["--embedding-dim", str(DIM)], ["--top", "32"]
GENERATED = ["--rows", "900", "--multi-hot"]


def _ratings(path, rows=900):
    """A file like MovieLens's, in which even users like even items."""
    chance = random.Random(0)
    lines = []
    for number in range(rows):
        user, item = chance.randrange(1, 30), chance.randrange(1, 60)
        rating = chance.randint(4, 5) if (user + item) % 2 == 0 else chance.randint(1, 3)
        lines.append(f"{user}\t{item}\t{rating}\t{880000000 + number // 3}\n")
    path.write_text("".join(lines))
    return path


MOVIELENS = ["--data-format", "movielens", "--data"]
RUNS = [
    ["--model", "lr", *GENERATED, "1"],
    ["--model", "fm", *WIDE, *MOVIELENS],
    ["--model", "deepfm", *WIDE, *TOP, *GENERATED, "3"],
    ["--model", "dlrm", *WIDE, *TOP, "--bottom", "16", *GENERATED, "3"],
]


def _trained(given):
    options = arguments.parse(given)
    return loop.run("dense", 0, dataset.load(options), options, lambda step: None)


def _both_ways(ratings):
    for given in RUNS:
        given = [*SMALL, *TABLES_OF_50, "--epochs", "2", *given]
        given += [ratings] if given[-1] == "--data" else []
        data, des = _trained(given), _trained([*given, "--parallel", "des"])
        assert len(data.loss) >= 8 and data.loss[0] != data.loss[-1]
        assert des.loss == pytest.approx(data.loss, rel=1e-5), given
        if dist.get_rank() == 0:
            scores = data.auc, data.log_loss
            assert (des.auc, des.log_loss) == pytest.approx(scores, rel=1e-4), given


def test_des_training_is_data_parallel_training(tmp_path):
    """Sums of a row's gradients differ in their order, nothing else does."""
    launch(_both_ways, 2, str(_ratings(tmp_path / "u.data")))


def test_bytes_by_formula(tmp_path):
    """The same partial results for one id a bag as for several; about half of the ids cross."""
    numel = 14 + (13 + TABLES * DIM + 1) * 32 + 33
    partial = 4 * BATCH * (2 + DIM + TABLES * DIM)
    lengths = 48 + 4 * TABLES * BATCH
    for multi_hot, low, high in (("1", 0.4, 0.6), ("4", 0.9, 1.2)):
        out = tmp_path / multi_hot
        given = ["--parallel", "des", "--model", "deepfm", *WIDE, *TOP, *GENERATED, multi_hot]
        assert main([*SMALL, *TABLES_OF_50, *given, "--out", str(out)]) == 0
        (run,) = json.loads((out / "summary.json").read_text())["modes"]["dense"]
        sent = {name: run[f"{name}_bytes_per_step_per_rank"] for name in PURPOSES}
        assert sent["mp_forward"] == sent["mp_backward"] == partial
        assert sent["dp"] == 4 * numel
        ids = (sent["ids"] - lengths) / (4 * TABLES * BATCH)  # of a bag, to the other rank
        assert low < ids < high
        assert sum(sent.values()) == run["wire_bytes_per_step_per_rank"]
        assert run["ranks_equal"] is True


DYNAMIC = ["--parallel", "des", "--model", "fm", *WIDE, *GENERATED, "2", "--dynamic-rows"]


def _rows_of_what_is_trained_on():
    """A row for each feature of the training rows, none for one that the test alone has."""
    options = arguments.parse([*SMALL, *DYNAMIC, "5000", "--epochs", "3"])
    data = dataset.load(options)
    every = [None] * 2
    dist.all_gather_object(every, (data.train.ids.unique(), data.test.ids.unique()))
    trained = torch.cat([train for train, _ in every])
    tested = torch.cat([test for _, test in every])
    assert (~torch.isin(tested, trained)).sum() > 20
    model, run = loop.train("dense", 0, data, options, lambda step: None)
    loop.test(model, data.test, data.train)
    owned = [None] * 2
    dist.all_gather_object(owned, model.tables.rows.ids())
    model.close()
    assert not torch.isin(*owned).any() and min(map(len, owned)) > 300
    made = torch.cat(owned)
    assert torch.isin(made, trained).all()
    # Batches leave out the last few rows of every epoch, other ones each time.
    assert len(made) > 0.99 * (trained.unique() >= 0).sum()
    # Rows of their own: what tables of 50 rows cannot tell apart, they learn by heart.
    assert run.loss[-6:].mean() < run.loss[:6].mean()


def test_rows_that_appear():
    launch(_rows_of_what_is_trained_on, 2)


def test_too_few_rows_for_those_that_appear(tmp_path, capsys):
    assert main([*SMALL, *DYNAMIC, "300", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    op = "dct::EquivalentSubstitution"
    rule = f"{op}: capacity must be at least the number of features seen, got 300 for "
    assert said.startswith(f"train_dlrm.py: --dynamic-rows must be enough for a rank: {rule}")
    assert said.count("\n") == 1


def test_names_of_values():
    """A name for each column and value, missing ones too; none for a place that is empty."""
    values = np.array(
        [[[5, 9, 5], [5, EMPTY, EMPTY]], [[MISSING, EMPTY, EMPTY], [2**63 - 1, 0, 9]]]
    )
    names = name_values(values)
    assert names.dtype == np.int64 and (names[values == EMPTY] == -1).all()
    columns = np.broadcast_to(np.arange(2).reshape(1, 2, 1), values.shape)
    there = values != EMPTY
    pairs = set(zip(columns[there], values[there], strict=True))
    assert len(set(names[there])) == len(pairs) == 7 and names[there].min() >= 0
    assert names[0, 0, 0] == names[0, 0, 2] != names[0, 1, 0]
    assert (name_values(values[:1]) == names[:1]).all()  # whatever the rows beside them
