"""bench/mp_density.py: what its ablations send, and what it prints."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dct_dlrm.launch import launch

BENCH = Path(__file__).parents[2] / "bench" / "mp_density.py"
sys.path.insert(0, str(BENCH.parent))
import mp_density  # noqa: E402

WIDTH, K = 16, 2
DENSITY = K / WIDTH


def _rows(rank):
    """26 rows for each of two ranks, of magnitudes that differ and that bfloat16 has."""
    generator = torch.Generator().manual_seed(rank)
    magnitudes = torch.stack([torch.randperm(WIDTH, generator=generator) for _ in range(52)]) + 1
    # Rows of ever larger values, so that a threshold of the whole batch is not one of every row.
    return (magnitudes * 2.0 ** (torch.arange(52) % 13)[:, None] / 16).requires_grad_()


def _largest(x):
    return torch.zeros_like(x).scatter(1, x.abs().topk(K, 1).indices, 1)


def _exchanges(folder):
    """Values that arrive and gradients that return, against masks that torch.topk makes."""
    rank, splits = dist.get_rank(), [26, 26]
    sent = [_rows(r).detach() for r in range(2)]
    weight = torch.arange(52 * WIDTH).view(52, WIDTH).remainder(251).float()
    returned = torch.cat([weight[26 * rank :][:26], weight[26 * rank :][:26]])
    own = slice(26 * rank, 26 * rank + 26)

    def run(exchange):
        x = _rows(rank)
        y = exchange(x, splits, splits, group=dist.group.WORLD)
        (y * weight).sum().backward()
        return y.detach(), x.grad

    y, grad = run(mp_density.fresh_mask(DENSITY))
    assert torch.equal(y, torch.cat([(x * _largest(x))[own] for x in sent]))
    assert torch.equal(grad != 0, _largest(returned) != 0)
    assert torch.equal(grad, returned * (grad != 0))

    y, grad = run(mp_density.one_threshold(DENSITY))
    thresholds = [x.flatten().topk(52 * K).values[-1] for x in sent]
    masks = [(x >= t).float() for x, t in zip(sent, thresholds, strict=True)]
    assert 52 * K <= masks[rank].sum() < 60 * K
    assert not torch.equal(masks[rank], _largest(sent[rank]))
    assert torch.equal(y, torch.cat([(x * m)[own] for x, m in zip(sent, masks, strict=True)]))
    assert torch.equal(grad, returned * masks[rank])

    y, grad = run(mp_density.wide_rows(DENSITY))  # of 13 tables, two samples a rank
    of_samples = [[26 * r + s + 2 * table for table in range(13)] for r in range(2) for s in (0, 1)]
    masks = []
    for x in sent:
        masks.append(torch.zeros_like(x))
        for rows in of_samples:
            kept = torch.zeros(13 * WIDTH)
            kept[x[rows].flatten().topk(13 * K).indices] = 1
            masks[-1][rows] = kept.view(13, WIDTH)
    assert torch.equal(y, torch.cat([(x * m)[own] for x, m in zip(sent, masks, strict=True)]))
    assert torch.equal(grad, returned * masks[rank])
    Path(folder, f"done{rank}").touch()


@pytest.mark.large
def test_every_exchange_sends_what_it_says():
    with tempfile.TemporaryDirectory() as folder:
        launch(_exchanges, 2, folder)
        assert len(list(Path(folder).iterdir())) == 2


def test_the_best_learning_rate_of_each():
    losses = {("a", 1): (3, 5), ("a", 2): (4, 3), ("b", 1): (1, 1), ("b", 2): (2, 0.5)}
    records = [
        {"exchange": name, "embedding_lr": rate, "seed": seed, "log_loss": loss[seed]}
        for seed in range(2)
        for (name, rate), loss in losses.items()
    ]
    found = mp_density.best(records)
    assert {name: runs[0]["embedding_lr"] for name, runs in found.items()} == {"a": 2, "b": 1}
    assert [run["seed"] for run in found["a"]] == [0, 1]


@pytest.mark.large
def test_the_bench_runs_and_reports(tmp_path):
    small = "--rows 1500 --hash-size 50 --embedding-dim 16 --bottom 8 --top 16"
    command = [sys.executable, BENCH, *small.split(), "--densities", "0.125", "--ablations"]
    command += ["--seeds", "2", "--embedding-lrs", "0.1,1", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    names = ["float32", "float16", "DCT 12.5 %"]
    names += [f"12.5 %, {kind}" for kind in ("fresh mask", "one threshold", "wide rows")]
    assert len(runs) == 2 * 2 * len(names)
    rows = 128 * 13  # that leave a rank, and that come to it
    expected = {"float32": (64, 64), "float16": (32, 32)}
    expected["DCT 12.5 %"] = (2 * 2 + 2, 2 * 2)
    for name, run in zip(4 * names, runs, strict=True):
        assert run["exchange"] == name
        assert name in done.stdout
        assert run["counted"] == (name in expected or "wide" in name)
        assert ("auc_off" in run) == ("%" in name)
        if name in expected:
            sent = [run[f"mp_{way}_bytes_per_step_per_rank"] for way in ("forward", "backward")]
            assert sent == [rows * nbytes for nbytes in expected[name]]


@pytest.mark.large
@pytest.mark.parametrize("extra", [["--mp-densities", "1"], ["--batch-size", "0"]])
def test_an_unknown_or_wrong_option_is_named(extra):
    done = subprocess.run([sys.executable, BENCH, *extra], capture_output=True, text=True)
    assert done.returncode == 2
    assert extra[0] in done.stderr
