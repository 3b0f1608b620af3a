"""dct-bench: one subcommand per folder."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from dct_dlrm.command_line import VERSION, Parser, exit_status

from .kernels import arguments as kernels
from .link import arguments as link
from .report import arguments as report
from .scale import arguments as scale

COMMANDS = {"kernels": kernels, "link": link, "scale": scale, "report": report}

DESCRIPTION = "Measure what Dynamic Communication Thresholding costs and saves."


def main(arguments: Sequence[str] | None = None) -> int:
    """The console command: its exit status, with a message on stderr if that is not 0."""
    parser = Parser(prog="dct-bench", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=VERSION)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add_parser(subparsers, name)
    options = parser.parse_args(arguments)
    return exit_status(f"dct-bench {options.command}", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    # Here, so that the help needs nothing beside torch.
    return importlib.import_module(f".{options.command}.command", __package__).run(options)


if __name__ == "__main__":
    sys.exit(main())
