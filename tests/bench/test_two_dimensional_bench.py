"""bench/experiments/two_dimensional.py: what a variant's name sets, its rates and its report."""

import argparse

import pytest

from dlrm import arguments
from experiments import two_dimensional
from experiments.two_dimensional import NAMES, Variant


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
        ("scaled/1/bfloat16", (2, "momentum_scaled_rowwise_adagrad", False, 1, "bfloat16")),
        ("delayed/100/dct", (2, "momentum_scaled_rowwise_adagrad", True, 100, None)),
    ],
)
def test_options_of_a_variant(name, expected):
    options = arguments.parse(["--parallel", "2d"])
    own = two_dimensional.options_of(name, 0.5, options)
    assert own.embedding_lr == 0.5 and options.embedding_lr is None
    got = own.replicas, own.embedding_optimizer, own.delayed_accumulator, own.sync_every
    assert (*got, own.sync_format) == expected
