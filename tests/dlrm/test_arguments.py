"""The command line: a wrong argument is named with its rule and its value; the help teaches."""

import re
from functools import partial
from pathlib import Path

import pytest

import cli
from dlrm import arguments
from dlrm.errors import UsageError
from dlrm.option_rules import flag
from dlrm.train import _folder, main

COUNT = "must be an integer >= 1, got"
FRACTION = "must be a number in (0, 1), got"
ZIPF = (
    "must be tables in [1, 100], rows in [3, 2^31) and an exponent in (1, 10), joined by ',', got"
)
WIDTHS = "must be integers >= 1 joined by '-', such as 512-256, got"


@pytest.mark.parametrize(
    "argument, value, rule",
    [
        ("--density", "0", "must be a number in (0, 1], got '0'"),
        ("--density", "1.5", "must be a number in (0, 1], got '1.5'"),
        ("--density", "nan", "must be a number in (0, 1], got 'nan'"),
        ("--ranks", "0", f"{COUNT} '0'"),
        ("--ranks", "two", f"{COUNT} 'two'"),
        ("--rows", "-5", f"{COUNT} '-5'"),
        ("--epochs", "0.5", f"{COUNT} '0.5'"),
        ("--batch-size", "0", f"{COUNT} '0'"),
        ("--seeds", "0", f"{COUNT} '0'"),
        ("--refresh-every", "0", f"{COUNT} '0'"),
        ("--bucket-mb", "0", f"{COUNT} '0'"),
        ("--embedding-dim", "0", f"{COUNT} '0'"),
        ("--hash-size", "1", "must be an integer in [2, 2^31), got '1'"),
        ("--zipf", "8,1000", f"{ZIPF} '8,1000'"),
        ("--zipf", "8,1000,1", f"{ZIPF} '8,1000,1'"),
        ("--lr", "0", "must be a number > 0, got '0'"),
        ("--lr", "inf", "must be a number > 0, got 'inf'"),
        ("--test-fraction", "0", f"{FRACTION} '0'"),
        ("--test-fraction", "1", f"{FRACTION} '1'"),
        ("--validation-fraction", "1", "must be a number in [0, 1), got '1'"),
        ("--validation-fraction", "0.8", "must leave rows to train on beside a --test-fraction of"),
        ("--bottom", "512,256", f"{WIDTHS} '512,256'"),
        ("--top", "512-0", f"{WIDTHS} '512-0'"),
        ("--modes", "dense,sparse", "must be some of dense,bf16,powersgd,dct, got 'dense,sparse'"),
        ("--modes", "dct,dct", "must have no value twice, got 'dct,dct'"),
        ("--max-malformed", "1.1", "must be a number in [0, 1], got '1.1'"),
        ("--policy", "loose", "invalid choice: 'loose'"),
        ("--transport", "ring", "invalid choice: 'ring'"),
        ("--row-density", "0", "must be a number in (0, 1], got '0'"),
        ("--row-density", "1.01", "must be a number in (0, 1], got '1.01'"),
        ("--row-format", "int4,int4,int4", "must be one or two of float32, bfloat16,"),
        ("--row-format", "int4,int5", "must be one or two of float32, bfloat16,"),
        ("--embedding-lr", "0", "must be a number > 0, got '0'"),
        ("--parallel", "model", "invalid choice: 'model'"),
        ("--embedding-optimizer", "adam", "invalid choice: 'adam'"),
        ("--replicas", "0", f"{COUNT} '0'"),
        ("--sync-every", "0", f"{COUNT} '0'"),
        ("--sync-density", "0", "must be a number in (0, 1], got '0'"),
        ("--sync-format", "fp8", "invalid choice: 'fp8'"),
        ("--checkpoint-every", "0", f"{COUNT} '0'"),
    ],
)
def test_a_wrong_argument(capsys, argument, value, rule):
    with pytest.raises(SystemExit) as exit_info:
        main([f"{argument}={value}"])
    assert exit_info.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"train_dlrm.py: error: argument {argument}: {rule}")
    shown = "--help" if argument in arguments.MOST else "--help-all"
    assert said.endswith(f"; see train_dlrm.py {shown}\n") and said.count("\n") == 1


@pytest.mark.parametrize(
    "run, given, full",
    [
        (main, ["--dens", "0.5"], "--density"),
        (partial(cli.main, "scale"), ["--rate", "1gbit"], "--rates"),
    ],
)
def test_options_have_their_whole_names(capsys, run, given, full):
    with pytest.raises(SystemExit) as exit_info:
        run(given)
    assert exit_info.value.code == 2
    assert f"error: unrecognized arguments: {' '.join(given[-2:])}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run([*given[:-2], full, "no number"])
    assert f"error: argument {full}: must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, text",
    [
        (["--data=rows.tsv", "--rows=10"], "not allowed with argument --data"),
        (["--sync-format=bfloat16", "--sync-density=1"], "not allowed with argument --sync-format"),
        (["--local-size=2", "--ranks=3"], "--local-size must divide the ranks, 3, got 2"),
        (["--local-size=2", "--modes=dense"], "must come with --modes dct, got dense"),
    ],
)
def test_options_that_exclude_each_other(capsys, given, text):
    with pytest.raises(SystemExit):
        main(given)
    assert text in capsys.readouterr().err


def test_nodes_are_of_so_many_ranks(monkeypatch):
    assert arguments.parse(["--local-size", "2"]).ranks == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert arguments.parse(["--local-size", "4"]).local_size == 4  # of torchrun's ranks


@pytest.mark.parametrize(
    "data, out, text",
    [
        ("none.tsv", "", "train_dlrm.py: {folder}/none.tsv must be a file, got nothing\n"),
        ("n" * 300, "", "must be readable to its end, got: [Errno"),
        (None, "taken", "--out must be a folder that can be written to"),
    ],
    ids=["none", "a name too long", "a file"],
)
def test_files_that_cannot_be(tmp_path, capsys, data, out, text):
    (tmp_path / "taken").write_text("a file")
    given = [] if data is None else ["--data", str(tmp_path / data)]
    assert main([*given, "--out", str(tmp_path / out)]) == 1
    said, text = capsys.readouterr().err, text.format(folder=tmp_path)
    assert said == text if text.startswith("train_dlrm.py") else text in said


@pytest.mark.parametrize(
    "make, name, folder",
    [
        (Path.touch, "checkpoint", ""),
        (Path.mkdir, "summary.json", ""),
        (Path.mkdir, "history.json", ""),
        (Path.touch, "a file", "n" * 300),
    ],
)
def test_a_folder_that_is_no_place_for_results(tmp_path, make, name, folder):
    make(tmp_path / name)
    options = arguments.parse(["--overwrite", "--out", str(tmp_path / folder)])
    with pytest.raises(UsageError, match="--out must be a folder that can be written to, got"):
        _folder(options)


def test_values_of_the_paper_setup():
    options = arguments.parse(["--modes", "dense,bf16", "--bottom", "512-256-64"])
    assert (options.embedding_dim, options.lr) == (16, 0.1)
    assert options.modes == ["dense", "bf16"]
    assert options.bottom == [512, 256, 64] and options.top == [512, 256]


def _options_of(option, capsys):
    """The options that a help explains, once what both helps hold is found in it."""
    with pytest.raises(SystemExit) as exit_info:
        main([option])
    text = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert "examples:" in text and "torchrun" in text
    assert "rows per rank and step (default: 128)" in " ".join(text.split())
    return set(re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE))


def test_help_has_examples_units_and_defaults(capsys):
    every = _options_of("--help-all", capsys)
    settings = {flag(name) for name in vars(arguments.parse([]))}
    assert every == settings | {"--help", "--help-all", "--version"}


def test_help_begins_with_what_most_people_need(capsys):
    most = _options_of("--help", capsys)
    assert most == {*arguments.MOST, "--help", "--help-all"}
    assert len(arguments.MOST) == 12
