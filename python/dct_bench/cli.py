"""dct-bench: one subcommand per module."""

import argparse
import sys
from collections.abc import Sequence

from dct_dlrm.errors import UsageError

from . import report
from .kernels import command as kernels
from .link import command as link
from .scale import command as scale

COMMANDS = {"kernels": kernels, "link": link, "scale": scale, "report": report}

DESCRIPTION = "Measure what Dynamic Communication Thresholding costs and saves."


def main(arguments: Sequence[str] | None = None) -> int:
    """The console command: its exit status, with a message on stderr if that is not 0."""
    parser = argparse.ArgumentParser(prog="dct-bench", description=DESCRIPTION)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add_parser(subparsers, name)
    options = parser.parse_args(arguments)
    try:
        return COMMANDS[options.command].run(options)
    except UsageError as error:
        print(f"dct-bench {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"dct-bench {options.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
