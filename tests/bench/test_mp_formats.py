"""experiments.mp_formats: names of exchanges, counted bytes, reuse of finished runs."""

import argparse

import pytest

from bench.experiments import clicks, mp_formats, runs
from dct_parallel import RowFormat


def test_names_of_exchanges():
    assert mp_formats.parse_exchange("int4,sign+dedup") == (RowFormat("int4", "sign"), True)
    assert mp_formats.parse_exchange("7.5%") == (RowFormat("bfloat16", density=0.075), False)


@pytest.mark.parametrize("name", ["int5", "int4,", "int4+", "int4+once", "0%", "101%", "x%", ""])
def test_a_wrong_name_raises(name):
    with pytest.raises(argparse.ArgumentTypeError, match="must"):
        mp_formats.known(name)


@pytest.mark.large
def test_bytes_are_counted_and_finished_runs_are_reused(tmp_path, monkeypatch, capfd):
    small = "--rows 1500 --hash-size 50 --embedding-dim 16 --bottom 8 --top 16 --seeds 1"
    given = [*small.split(), "--rates", "0.1,1e30", "--exchanges", "float32", "int4,sign+dedup"]
    parser = clicks.parser("mp_formats", "", mp_formats.NAMES, mp_formats.known)
    options = parser.parse_args([*given, "--out", str(tmp_path)])
    clicks.train_by_rates(options, mp_formats.job)
    records = {
        (r["method"], r["rate"], r["seed"]): r
        for r in runs.load(tmp_path, clicks.settings_of(options))
    }
    assert len(records) == 2 * (2 + 1)
    for name in options.exchanges:
        assert records[name, 1e30, 0]["diverged"] is True
        chosen, tested = (records[name, 0.1, seed] for seed in (0, 1))
        assert "test" not in chosen and 0.3 < tested["test"]["auc"] < 1
    sent = records["int4,sign+dedup", 0.1, 1]["bytes"]
    rows = (sent["ids"] - 40) / 4  # the counts of ids take 40 bytes
    assert 0 < rows < 0.5 * 128 * 13
    assert sent["rows forward"] == pytest.approx(rows * (8 + 2))
    assert sent["rows backward"] == pytest.approx(rows * (2 + 2))
    assert "| int4,sign+dedup |" in capfd.readouterr().out
    monkeypatch.setattr(clicks, "_work", lambda *_: pytest.fail("trained again"))
    clicks.train_by_rates(options, mp_formats.job)
