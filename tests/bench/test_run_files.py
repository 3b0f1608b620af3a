"""bench/experiments/run_files.py: a file for each run, rates by validation rows."""

from pathlib import Path

import pytest

from dlrm import files
from dlrm.errors import UsageError
from experiments import run_files
from experiments.run_files import Run


@pytest.mark.parametrize(
    ("name", "rate", "file"),
    [
        ("7.5%", 0.5, "7.5percent_lr0.5_seed2.json"),
        ("int4,sign+dedup", 16.0, "int4-sign+dedup_lr16_seed2.json"),
        ("c1/10/dct", 1e30, "c1-10-dct_lr1e+30_seed2.json"),
    ],
)
def test_files_of_runs(name, rate, file):
    assert Run(name, rate, 2).path(Path("out")) == Path("out") / file


def _record(exchange, rate, seed, loss):
    record = {"exchange": exchange, "rate": rate, "seed": seed}
    return record | {"validation": {"auc": 0.7, "log_loss": loss}}


def test_rates_are_chosen_by_the_validation_rows_of_seed_0():
    records = [_record("float32", rate, 0, loss) for rate, loss in ((1, 0.5), (3, 0.4), (9, 0.6))]
    records += [_record("int4", rate, 0, loss) for rate, loss in ((1, 0.3), (3, 0.4))]
    records += [_record("float32", 9, seed, 0.1) for seed in (1, 2)]  # other seeds do not count
    records += [{"exchange": "int4", "rate": 9, "seed": 0, "diverged": True}]
    assert run_files.best_rates(records) == {"float32": 3, "int4": 1}


def test_runs_of_other_settings_are_refused(tmp_path):
    run = Run("7.5%", 0.5, 3)
    files.write_json(run.path(tmp_path), run._asdict() | {"settings": {"epochs": 5}})
    assert run_files.read(tmp_path, {"epochs": 5})[0]["rate"] == 0.5
    assert len(run_files.read(tmp_path, {"epochs": 5, "data": None})) == 1  # generated rows
    with pytest.raises(UsageError, match=r"runs of one setting, got epochs 5 in .*, 4 asked for"):
        run_files.read(tmp_path, {"epochs": 4})
    with pytest.raises(UsageError, match=r"got data None in .*, rows.tsv asked for"):
        run_files.read(tmp_path, {"epochs": 5, "data": "rows.tsv"})


def test_a_file_that_was_cut_off_is_refused_by_name(tmp_path):
    path = Run("7.5%", 0.5, 3).path(tmp_path)
    files.write_json(path, {"settings": {}})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UsageError, match=f"{path} must be as it was written"):
        run_files.read(tmp_path, {})
