"""The options of dct-bench: each is explained, and none is guessed."""

import argparse
import importlib

import pytest

from dct_bench import cli


def _parser(command):
    subparsers = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"dct_bench.{command}.arguments").add_parser(subparsers, command)
    return subparsers.choices[command]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_option_says_what_it_is_for(command):
    options = [action for action in _parser(command)._actions if action.option_strings]
    assert [action.option_strings[0] for action in options if not action.help] == []


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_no_default_is_shown_as_python(command):
    assert "(default: [" not in _parser(command).format_help()


@pytest.mark.parametrize("given", [["kernels", "--siz", "64"], ["scale", "--dens", "0.1"]])
def test_no_option_is_guessed_from_its_beginning(given, capsys):
    with pytest.raises(SystemExit):
        cli.main(given)
    assert f"unrecognized arguments: {given[1]}" in capsys.readouterr().err
