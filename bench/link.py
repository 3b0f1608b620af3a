"""Step time and bytes of training over links of a set rate."""

import sys
from collections.abc import Sequence

from bench.cli import exit_status
from bench.network import arguments, command


def main(given: Sequence[str] | None = None) -> int:
    return exit_status("link", lambda: command.run(arguments.parser().parse_args(given)))


if __name__ == "__main__":
    sys.exit(main())
