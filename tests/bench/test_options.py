"""The options of the programs in bench/: each is explained, and none is guessed."""

import importlib
import runpy

import pytest
from programs import ROOT

from bench import cli

FOLDERS = cli.FOLDERS.values()
EXPERIMENTS = [
    path.stem
    for path in sorted((ROOT / "bench" / "experiments").glob("*.py"))
    if "__main__" in path.read_text()
]


def _parser(folder):
    return importlib.import_module(f"{folder}.arguments").parser()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_option_says_what_it_is_for(folder):
    options = [action for action in _parser(folder)._actions if action.option_strings]
    assert [action.option_strings[0] for action in options if not action.help] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_default_is_shown_as_python(folder):
    assert "(default: [" not in _parser(folder).format_help()


@pytest.mark.parametrize(("name", "given"), [("kernels", "--siz"), ("scale", "--dens")])
def test_no_option_is_guessed_from_its_beginning(name, given, capsys):
    with pytest.raises(SystemExit):
        cli.main(name, [given, "0.1"])
    assert f"unrecognized arguments: {given}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["experiments." + name for name in EXPERIMENTS] + ["pages"])
def test_experiments_say_how_they_are_run(name, capsys, monkeypatch):
    if name.endswith("torchrec_dlrm"):
        pytest.importorskip("fbgemm_gpu", reason="TorchRec is in the environment of make torchrec")
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__")
    assert end.value.code in (0, None)
    assert name.rpartition(".")[2] in capsys.readouterr().out.partition("\n")[0]
