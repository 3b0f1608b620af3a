"""The programs of bench/ explain their options and accept no abbreviations."""

import importlib
import re
import runpy
import shlex

import pytest

from bench import cli
from bench.cli import exit_status
from support.programs import ROOT

NAMES = ("hooks", "kernels", "link", "scale")
PROGRAMS = [f"bench.{name}" for name in NAMES]
PROGRAMS += [
    f"bench.experiments.{path.stem}"
    for path in sorted((ROOT / "bench" / "experiments").glob("*.py"))
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_shows_how_to_run_the_program(name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__")
    printed = capsys.readouterr().out
    assert end.value.code in (0, None)
    assert printed.startswith(f"usage: python -m {name} ") and "(default: [" not in printed


@pytest.mark.parametrize("name", ["hooks", "kernels", "link"])
def test_the_eager_backend_is_timed_only_on_request(name, capsys, monkeypatch):
    monkeypatch.setattr(cli, "backend_of", lambda device: "eager")
    monkeypatch.delenv("DCT_BACKEND", raising=False)
    assert importlib.import_module(f"bench.{name}").main([]) == 1
    assert f"{name}: the backend on c" in capsys.readouterr().err
    monkeypatch.setenv("DCT_BACKEND", "eager")
    cli.announce_backend("cpu")
    assert capsys.readouterr().out == "Backend on cpu: eager\n"


def test_an_interrupted_program_exits_with_status_130(capsys):
    def work():
        raise KeyboardInterrupt

    assert exit_status("program", work) == 130
    assert capsys.readouterr().err == "program: interrupted\n"


def test_every_program_is_named_in_the_readme():
    page = (ROOT / "bench" / "README.md").read_text()
    assert [name for name in PROGRAMS if f" -m {name}`" not in page] == []


def test_commands_in_the_documentation_are_accepted():
    pages = [ROOT / "README.md", *(ROOT / "docs" / "guide").glob("*.md")]
    text = "\n".join(page.read_text().replace("\\\n", " ") for page in pages)
    pattern = r"^(?:sudo \$\(which python\)|python) -m bench\.(\w+)((?: .*)?)$"
    commands = re.findall(pattern, text, re.M)
    assert {name for name, _ in commands} == set(NAMES)
    for name, given in commands:
        parser = importlib.import_module(f"bench.{name}").parser()
        parser.parse_args(shlex.split(given, comments=True))
