"""dct-train --parallel des: the data-parallel training with other traffic; LR, FM, DeepFM, DLRM."""

import json
import random

import pytest
import torch.distributed as dist

from dct_dlrm import arguments, loop
from dct_dlrm.data import dataset
from dct_dlrm.launch import launch
from dct_dlrm.train import main

BATCH, DIM, TABLES = 64, 8, 26
PURPOSES = ("ids", "mp_forward", "mp_backward", "dp")
SMALL = ["--batch-size", str(BATCH), "--hash-size", "50", "--bottom", "16", "--top", "32"]
SMALL += ["--embedding-dim", str(DIM), "--modes", "dense"]
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
    ["--model", "fm", *MOVIELENS],
    ["--model", "deepfm", *GENERATED, "3"],
    ["--model", "dlrm", *GENERATED, "3"],
]


def _trained(given):
    options = arguments.parse(given)
    return loop.run("dense", 0, dataset.load(options), options, lambda step: None)


def _both_ways(ratings):
    for given in RUNS:
        given = [*SMALL, "--epochs", "2", *given, *([ratings] if given[-1] == "--data" else [])]
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
        given = ["--parallel", "des", "--model", "deepfm", *GENERATED, multi_hot]
        assert main([*SMALL, *given, "--out", str(out)]) == 0
        (run,) = json.loads((out / "summary.json").read_text())["modes"]["dense"]
        sent = {name: run[f"{name}_bytes_per_step_per_rank"] for name in PURPOSES}
        assert sent["mp_forward"] == sent["mp_backward"] == partial
        assert sent["dp"] == 4 * numel
        ids = (sent["ids"] - lengths) / (4 * TABLES * BATCH)  # of a bag, to the other rank
        assert low < ids < high
        assert sum(sent.values()) == run["wire_bytes_per_step_per_rank"]
        assert run["ranks_equal"] is True


@pytest.mark.parametrize(
    "given, rule",
    [
        (["--model", "fm"], "argument --model: must be dlrm with --parallel hybrid, got fm"),
        (["--multi-hot", "2"], "argument --multi-hot: must be 1 with --parallel hybrid, got 2"),
        (["--data-format", "movielens"], "argument --data-format: must be criteo with --parallel"),
    ],
)
def test_what_hybrid_cannot_do(capsys, given, rule):
    with pytest.raises(SystemExit):
        main(["--parallel", "hybrid", *given])
    assert rule in capsys.readouterr().err
