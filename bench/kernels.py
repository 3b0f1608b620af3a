"""Microbenchmarks: every op beside a copy of the bytes that it must move, and beside peers."""

import sys
from collections.abc import Sequence

from bench.cli import exit_status
from bench.microbench.arguments import parser
from bench.microbench.command import run


def main(given: Sequence[str] | None = None) -> int:
    return exit_status("kernels", lambda: run(parser().parse_args(given)))


if __name__ == "__main__":
    sys.exit(main())
