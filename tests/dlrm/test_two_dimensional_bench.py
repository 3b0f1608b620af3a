"""bench/two_dimensional.py: what a variant's name sets, its rates and its report."""

import argparse
import sys
from pathlib import Path

import pytest

from dct_dlrm import arguments

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import two_dimensional  # noqa: E402
from two_dimensional import NAMES, Variant  # noqa: E402


def test_names_of_variants():
    assert Variant.parse("mp") is None
    assert Variant.parse("delayed/10") == ("delayed", 10, "float32")
    assert Variant.parse("c1/100/dct") == ("c1", 100, "dct")
    for name in NAMES:
        Variant.parse(name)
    for wrong in ("c1", "c1/0", "c1/x", "c2/1", "c1/1/int8", "c1/1/dct/"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"must be mp, or c1\|scaled"):
            Variant.parse(wrong)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mp", (1, "rowwise_adagrad", False, 1, None)),
        ("c1/10", (2, "rowwise_adagrad", False, 10, "float32")),
        ("scaled/1/float16", (2, "momentum_scaled_rowwise_adagrad", False, 1, "float16")),
        ("delayed/100/dct", (2, "momentum_scaled_rowwise_adagrad", True, 100, None)),
    ],
)
def test_options_of_a_variant(name, expected):
    options = arguments.parse(["--parallel", "2d"])
    own = two_dimensional.options_of(name, 0.5, options)
    assert own.embedding_lr == 0.5 and options.embedding_lr is None
    got = own.replicas, own.embedding_optimizer, own.delayed_accumulator, own.sync_every
    assert (*got, own.sync_dtype) == expected


def _record(name, rate, seed, loss, sync=0.0):
    purposes = {"sync": sync, "mp_forward": 30.0, "mp_backward": 20.0}
    record = {f"{purpose}_bytes_per_step_per_rank": sent for purpose, sent in purposes.items()}
    score = {"auc": 0.7, "log_loss": loss}
    record |= {"exchange": name, "rate": rate, "seed": seed, "validation": score}
    return record | ({} if seed == 0 else {"test": score})


def test_report():
    records = [_record("mp", rate, 0, loss) for rate, loss in ((1, 0.5), (3, 0.4), (9, 0.45))]
    records += [_record("scaled/10", rate, 0, loss) for rate, loss in ((1, 0.3), (3, 0.4))]
    records += [{"exchange": "scaled/10", "rate": 9, "seed": 0, "diverged": True}]
    for seed, loss in ((1, 0.42), (2, 0.44)):
        records.append(_record("mp", 3, seed, loss))
        records.append(_record("scaled/10", 1, seed, loss + seed / 100, sync=1234))
    lines = two_dimensional.report(records).splitlines()
    assert "| mp | 0 | 50 | 3 | 2 | 0.7000 ± 0.0000 | 0.4300 ± 0.0141 |  |" in lines
    scaled = "| scaled/10 | 1,234 | 50 | 1 (edge) | 2 | 0.7000 ± 0.0000 | 0.4450 ± 0.0212 | "
    assert f"{scaled}+0.0150 ± 0.0071 |" in lines
    assert "| scaled/10 | 0.3000 (0.7000) | 0.4000 (0.7000) | diverged |" in lines
