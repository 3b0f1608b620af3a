"""The cost of tables by formula, against what a group of ranks sends, and limits."""

import dataclasses
import json
import math

import numpy as np
import pytest

from dct_bench.cli import main
from dct_bench.scale.cost_model import Link
from dct_bench.scale.tables import SYNCS, Tables, cost

TABLES = Tables(rows=1000, width=16, lookups=4, exponent=1.5, batch=8, sync_every=1, density=0.01)
LINK = Link(0.0, 1e9)


def test_rows_that_are_touched_are_those_of_a_simulation():
    rng = np.random.default_rng(0)
    chance = np.arange(1, 1001) ** -1.5
    for draws in (1, 30, 3000):
        drawn = [len(set(rng.choice(1000, draws, p=chance / chance.sum()))) for _ in range(200)]
        assert TABLES.touched(draws) == pytest.approx(np.mean(drawn), rel=0.05)
    assert TABLES.touched(1e12) == pytest.approx(1000)


def test_one_group_has_nothing_to_sync():
    for sync in SYNCS:
        whole = cost(TABLES, 8, 8, sync, LINK)
        assert whole.sync == 0 and whole.memory == 4 * 125 * 17
        # 8 samples of 4 rows of 64 bytes there and back, 7/8 of them to others.
        assert whole.rows == 2 * 64 * 28 and whole.ids == 4 * 28
        assert whole.seconds == pytest.approx((whole.rows + whole.ids) / 1e9)


def test_bytes_of_a_sync():
    union, changed = TABLES.touched(8 * 4 * 8) / 2, TABLES.touched(8 * 4 * 2) / 2
    sent = {sync: cost(TABLES, 8, 2, sync, LINK).sync for sync in SYNCS}
    assert sent["whole"] == 2 * 3 / 4 * 4 * 500 * 17
    assert sent["float32"] == pytest.approx(2 * 3 / 4 * union * 68 + 3 * 4 * changed)
    assert sent["float16"] == pytest.approx(2 * 3 / 4 * union * 36 + 3 * 4 * changed)
    payload = union * 16 * (1.25 * 0.01 * 4 + 4 / 16384)
    assert sent["dct"] == pytest.approx(3 * (payload + 10 * changed))
    assert sorted(sent, key=sent.get, reverse=True) == list(SYNCS)
    kept = {sync: cost(TABLES, 8, 2, sync, LINK).memory - 4 * 500 * 17 for sync in SYNCS}
    assert kept["float32"] == pytest.approx(500 + 4 * changed)  # a mark for each row
    assert kept["float16"] == pytest.approx(500 + 4 * changed + 64 * changed)
    assert kept["dct"] == pytest.approx(500 + 4 * changed + 68 * changed + 68 * union)
    rarely = dataclasses.replace(TABLES, sync_every=10)
    for sync in SYNCS:
        assert cost(rarely, 8, 2, sync, LINK).sync < sent[sync]
        assert cost(TABLES, 8, 2, sync, LINK).memory >= 4 * 500 * 17


def test_a_small_group_waits_for_fewer_messages():
    slow = Link(1e-3, math.inf)
    assert (
        cost(TABLES, 4096, 16, "dct", slow).seconds < cost(TABLES, 4096, 4096, "dct", slow).seconds
    )


def test_the_command(tmp_path, capsys):
    command = ["scale", "--model", "tables", "--ranks", "4,8", "--group-ranks", "4"]
    command += ["--rates", "1gbit", "--table-rows", "1000", "--lookups", "4", "--batch-size", "8"]
    command += ["--embedding-dim", "16", "--exponent", "1.5", "--out", str(tmp_path)]
    assert main(command) == 0
    costs = json.loads((tmp_path / "scale.json").read_text())["costs"]
    found = {(c["ranks"], c["way"]): c for c in costs}
    assert found[4, "full"]["memory"] == found[4, "dct"]["memory"] == 4 * 250 * 17
    assert found[8, "full"]["memory"] == 4 * 125 * 17
    expected = cost(TABLES, 8, 4, "dct", Link(1e-5, 1e9 / 8))
    assert found[8, "dct"]["sync"] == expected.sync > 0
    out = capsys.readouterr().out
    assert "computed, not measured" in out and "2D, changed rows" in out

    assert main([*command, "--group-ranks", "3"]) == 1
    assert "--ranks must be multiples of --group-ranks 3, got 4" in capsys.readouterr().err
