"""dct-bench: one subcommand per folder."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from dct_dlrm.command_line import Parser, add_version, exit_status

COMMANDS = ("kernels", "link", "scale")

DESCRIPTION = "Measure what Dynamic Communication Thresholding costs and saves."


def main(arguments: Sequence[str] | None = None) -> int:
    """The console command: its exit status, with a message on stderr if that is not 0."""
    return exit_status("dct-bench", lambda: _run(arguments))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; exits with status 2 and a text that names argument, rule and value."""
    parser = Parser(prog="dct-bench", description=DESCRIPTION)
    add_version(parser)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        _module(name, "arguments").add_parser(subparsers, name)
    return parser.parse_args(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    # Imports in order of need: the help needs torch alone, and Ctrl-C is answered meanwhile.
    options = parse(arguments)
    return exit_status(
        f"dct-bench {options.command}", lambda: _module(options.command, "command").run(options)
    )


def _module(command: str, name: str):
    return importlib.import_module(f".{command}.{name}", __package__)


if __name__ == "__main__":
    sys.exit(main())
