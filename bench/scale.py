"""A cost model: predicts step times for 2 to thousands of ranks."""

import sys
from collections.abc import Sequence

from bench.cli import exit_status
from bench.scaling import arguments, command


def main(given: Sequence[str] | None = None) -> int:
    return exit_status("scale", lambda: command.run(arguments.parser().parse_args(given)))


if __name__ == "__main__":
    sys.exit(main())
