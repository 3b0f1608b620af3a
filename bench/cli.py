"""The programs kernels.py, link.py and scale.py: a folder each, with its arguments and command."""

import importlib
from collections.abc import Sequence

import examples_path  # noqa: F401  (first)
from dlrm.command_line import exit_status

FOLDERS = {"kernels": "microbench", "link": "network", "scale": "scaling"}


def main(name: str, arguments: Sequence[str] | None = None) -> int:
    """The exit status of a program, with a message on stderr if that is not 0."""
    return exit_status(f"{name}.py", lambda: _run(FOLDERS[name], arguments))


def _run(folder: str, arguments: Sequence[str] | None) -> int:
    # Imports in order of need: the help needs torch alone, and Ctrl-C is answered meanwhile.
    options = importlib.import_module(f"{folder}.arguments").parser().parse_args(arguments)
    return importlib.import_module(f"{folder}.command").run(options)
