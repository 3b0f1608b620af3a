"""The command line of bench.kernels."""

import argparse
from pathlib import Path

import torch

from bench.cli import Parser, count, density, number, several

TIMED = ("mask_pack", "sample_threshold", "scatter_unpack")
TIMED += ("quantize_pack", "dequantize_sum")
TIMED += ("row_pack", "row_unpack", "row_quantize", "row_dequantize", "row_dequantize_sum")
TIMED += ("diff_pack", "patch_apply")
ROUNDS = 5  # turns of each call, except slow calls. In a turn, a call is timed on every buffer set
# Defaults of the long tables. In argparse, the defaults are None, to detect given options.
DEFAULTS = {
    "ops": TIMED,
    "sizes": (2**24,),
    "density": (0.01,),
    "row_widths": (64, 256, 1024),
    "rounds": ROUNDS,
}

DESCRIPTION = """\
Compare the time of each op with a copy that moves the same number of bytes (half read, half
written). Calls are timed in turns. By default, the program takes 20 seconds. It times mask_pack,
scatter_unpack and row_pack at one size, and prints one sentence for each op. With --all, or any
other option of the long tables, the program prints a table instead. The column `of copy` is the
copy's time divided by the op's time; an op with 100 % is as fast as a copy.

The tables also include the eager backend. mask_pack is compared with exact torch.topk, with error
feedback, and row_pack with torch.topk. On a GPU with nvcc, the tables add a copy kernel and
cub::DeviceSelect. Results are checked before calls are timed. On a GPU, times are device times.
"""
EPILOG = """\
examples:
  python -m bench.kernels
      three ops in 20 seconds
  python -m bench.kernels --all
      a table of all ops, which takes minutes
  python -m bench.kernels --sizes 16777216 --density 0.01
  python -m bench.kernels --device cuda --sizes 1048576,16777216,268435456 --density 0.001,0.01
  python -m bench.kernels --ops row_pack,row_unpack --row-widths 64,128,256,512,1024
"""


def parser() -> Parser:
    """Make a parser that, on an error, prints the argument, rule and value, and exits with 2."""
    parser = Parser(prog="python -m bench.kernels", description=DESCRIPTION, epilog=EPILOG)
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if cuda else "cpu",
        help="device of the ops",
    )
    parser.add_argument(
        "--threads",
        type=number(int, lambda n: 1 <= n <= 1024, "an integer in [1, 1024]"),
        metavar="N",
        help="CPU threads of all timed calls (default: 1 without the tables, for stable times on "
        f"busy cores; {torch.get_num_threads()} for the tables)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    tables = parser.add_argument_group("long tables (printed if any of these options is given)")
    tables.add_argument("--all", action="store_true", help="all ops, with the defaults below")
    tables.add_argument(
        "--ops",
        type=several(str, TIMED),
        metavar="OP,...",
        help=f"some of {', '.join(TIMED)} (default: all)",
    )
    tables.add_argument(
        "--sizes",
        type=several(count),
        metavar="N,...",
        help="numbers of elements. On the CPU, row ops use a quarter of the elements. Row ops skip "
        f"sizes smaller than the widest row (default: {_shown('sizes')})",
    )
    tables.add_argument(
        "--density",
        type=several(density),
        metavar="F,...",
        help="fractions of entries that are packed; row_pack and row_unpack use 0.05, and the ops "
        "on patches 0, 0.005, 0.03, 0.08 and 0.3 "
        f"(default: {_shown('density')})",
    )
    tables.add_argument(
        "--row-widths",
        type=several(count),
        metavar="N,...",
        help=f"entries per row, for the row ops (default: {_shown('row_widths')})",
    )
    tables.add_argument("--no-peers", action="store_true", help="time only our ops and copies")
    tables.add_argument("--graphs", action="store_true", help="time replays of CUDA graphs")
    tables.add_argument(
        "--rounds",
        type=count,
        metavar="N",
        help=f"turns of each call, except slow ones (default: {DEFAULTS['rounds']})",
    )
    return parser


def settle(options: argparse.Namespace) -> bool:
    """Set defaults. Return whether no option of the tables was given, for a short first look."""
    tables = (*DEFAULTS, "all", "no_peers", "graphs")
    first_look = not any(getattr(options, name) for name in tables)
    for name, default in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.threads is None:
        options.threads = 1 if first_look else torch.get_num_threads()
    return first_look


def _shown(name: str) -> str:
    return ",".join(map(str, DEFAULTS[name]))
