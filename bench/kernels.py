"""Compares the ops with a copy of the same number of bytes, and with other methods."""

import sys
from collections.abc import Sequence

from bench.cli import exit_status
from bench.microbench.arguments import parser
from bench.microbench.command import run


def main(given: Sequence[str] | None = None) -> int:
    return exit_status("kernels", lambda: run(parser().parse_args(given)))


if __name__ == "__main__":
    sys.exit(main())
