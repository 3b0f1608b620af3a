"""Options that would do nothing are refused: each names itself, what it needs, and what it got."""

import re
import shlex

import pytest
from programs import ROOT

from dlrm import arguments
from dlrm.option_rules import RULES, flag

SCALED = "momentum_scaled_rowwise_adagrad"
MP = "must come with --parallel hybrid or 2d, got"
GRID = "must come with --parallel 2d, got"
DCT = "must come with --modes dct, got"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("--dedup", f"--dedup {MP} data"),
        ("--dedup --parallel des", f"--dedup {MP} des"),
        ("--row-format int8,int8 --parallel data", f"--row-format {MP} data"),
        ("--row-density 0.05", f"--row-density {MP} data"),
        ("--replicas 2 --parallel hybrid", f"--replicas {GRID} hybrid"),
        ("--sync-every 1 --parallel des", f"--sync-every {GRID} des"),
        ("--sync-density 0.1 --parallel hybrid", f"--sync-density {GRID} hybrid"),
        ("--sync-format bfloat16", f"--sync-format {GRID} data"),
        (f"--embedding-optimizer {SCALED}", f"--embedding-optimizer {SCALED} {GRID} data"),
        ("--dynamic-rows 9", "--dynamic-rows must come with --parallel des, got data"),
        ("--parallel 2d --model fm", "--model fm must come with --parallel data or des, got 2d"),
        ("--parallel hybrid --multi-hot 2", "--multi-hot 2 must come with --parallel data or des"),
        (
            "--parallel hybrid --data u.data --data-format movielens",
            "--data-format movielens must come with --parallel data or des, got hybrid",
        ),
        ("--density 0.005 --modes dense", f"--density {DCT} dense"),
        ("--refresh-every 9 --modes dense,bf16", f"--refresh-every {DCT} dense,bf16"),
        (
            "--format int4 --density 0.1",
            "--density 0.1 must come with --format bfloat16 or float32, got int4",
        ),
        ("--policy fixed --modes powersgd", f"--policy {DCT} powersgd"),
        ("--transport all_gather --modes bf16", f"--transport {DCT} bf16"),
        ("--parallel hybrid --modes dense --row-format int8,int8", f"--row-format {DCT} dense"),
        ("--parallel 2d --modes bf16 --sync-format bfloat16", f"--sync-format {DCT} bf16"),
        ("--parallel 2d --modes dense --sync-density 0.1", f"--sync-density {DCT} dense"),
        ("--parallel 2d --modes dense --row-density 0.1", f"--row-density {DCT} dense"),
        (
            "--parallel 2d --delayed-accumulator",
            f"--delayed-accumulator must come with --embedding-optimizer {SCALED}, got sgd",
        ),
        ("--model lr --embedding-dim 8", "--embedding-dim must come with --model dlrm or fm or"),
        ("--model deepfm --bottom 8", "--bottom must come with --model dlrm, got deepfm"),
        ("--model fm --top 8", "--top must come with --model dlrm or deepfm, got fm"),
        ("--data-format criteo", "--data-format must come with --data, got none"),
        ("--max-malformed 0.5", "--max-malformed must come with --data, got none"),
        ("--data x --multi-hot 3", "--multi-hot must come without --data, got both"),
        ("--zipf 8,99,1.1 --hash-size 9", "--hash-size must come without --zipf, got both"),
        (
            "--parallel des --dynamic-rows 9 --hash-size 9",
            "--hash-size must come without --dynamic-rows, got both",
        ),
        ("--resume", "--resume must come with --out, got none"),
        ("--resume --out x --overwrite", "--resume must come without --overwrite, got both"),
    ],
)
def test_what_would_be_ignored_is_refused(capsys, given, text):
    with pytest.raises(SystemExit) as exit_info:
        arguments.parse(given.split())
    assert exit_info.value.code == 2
    assert f"train_dlrm.py: error: {text}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        "",
        *(f"--parallel {name}" for name in ("data", "hybrid", "2d", "des")),
        *(f"--modes {name}" for name in ("dense", "bf16", "powersgd", "dct")),
        *(f"--model {name}" for name in ("lr", "fm", "deepfm")),
        "--parallel hybrid --model dlrm --multi-hot 1 --row-format int8,int4 --dedup",
        "--parallel hybrid --modes dense --dedup --embedding-optimizer rowwise_adagrad",
        "--parallel hybrid --data x --data-format criteo --max-malformed 0",
        f"--parallel 2d --embedding-optimizer {SCALED} --delayed-accumulator --sync-format int8",
        "--parallel 2d --replicas 2 --sync-every 9 --row-density 0.1 --modes dense,dct",
        "--parallel des --model fm --embedding-dim 8 --dynamic-rows 99 --multi-hot 2",
        "--data x --data-format movielens --model deepfm --top 8 --embedding-dim 8",
        "--density 0.1 --policy fixed --refresh-every 9 --transport reduce_scatter",
        "--format float32 --modes dct",
        "--resume --out x",
    ],
)
def test_what_has_an_effect_is_accepted(given):
    arguments.parse(given.split())


def test_rules_are_of_options_that_there_are():
    options = arguments.parse([])
    for rule in RULES:
        for name in [*rule.options.split(), rule.setting]:
            assert hasattr(options, name), name
    assert flag("row_density") == "--row-density"


def test_values_are_those_given_or_the_defaults():
    options = arguments.parse(["--replicas", "3", "--parallel", "2d", "--dedup"])
    assert (options.replicas, options.dedup, options.sync_every) == (3, True, 1)
    assert options.modes == ["dense", "dct"] and options.sync_format is None


def _commands():
    """Every command line of train_dlrm.py in the documentation, and in its own help."""
    texts = [path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]]
    for text in [*texts, arguments.EPILOG, arguments.EPILOG_OF_MOST]:
        lines = text.replace("\\\n", " ").splitlines()
        for line in lines:
            found = re.match(r"\s*(?:torchrun .* |python )examples/train_dlrm\.py( .*)?$", line)
            if found:
                yield " ".join(shlex.split(found[1] or "", comments=True))


@pytest.mark.parametrize("command", sorted(set(_commands())))
def test_commands_of_the_documentation(command):
    arguments.parse(command.split())


def test_there_are_such_commands():
    assert len(set(_commands())) > 12
