"""The command line of dct-bench report."""

import argparse
from pathlib import Path

from dct_dlrm.command_line import Formatter

DESCRIPTION = """\
Read every JSON file in DIR that `dct-bench kernels --json` or bench/gpu/check.py wrote, and write
beside them
  report.md      all measurements as a table
  of_copy.png    per op, at the largest size: its rate as a fraction of a copy's, the roofline
  by_size.png    time over size, of every op and what it is compared with
  by_density.png the same over density, at the largest size
"""


def add_parser(subparsers: argparse._SubParsersAction, name: str) -> None:
    parser = subparsers.add_parser(
        name,
        help="tables and plots of what `kernels` measured",
        description=DESCRIPTION,
        formatter_class=Formatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
