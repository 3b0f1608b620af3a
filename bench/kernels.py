"""Microbenchmarks: every op beside a copy of the bytes that it must move, and beside peers."""

import sys
from collections.abc import Sequence

from bench.cli import exit_status
from bench.microbench import arguments, command


def main(given: Sequence[str] | None = None) -> int:
    return exit_status("kernels", lambda: command.run(arguments.parser().parse_args(given)))


if __name__ == "__main__":
    sys.exit(main())
