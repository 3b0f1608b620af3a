"""The command line of bench.kernels."""

import argparse
from pathlib import Path

import torch

from bench.cli import Parser, count, density, number, several

TIMED = ("mask_pack", "sample_threshold", "scatter_unpack")
TIMED += ("quantize_pack", "dequantize_sum", "dequantize_sum_pack")
TIMED += ("row_pack", "row_unpack", "row_quantize", "row_dequantize", "row_dequantize_sum")
ROUNDS = 5  # turns of a fast call; each is timed on every buffer set
# Of the long tables. The options themselves default to None: given or not decides what is done.
DEFAULTS = {
    "ops": TIMED,
    "sizes": (2**24,),
    "density": (0.01,),
    "row_widths": (64, 256, 1024),
    "rounds": ROUNDS,
}

DESCRIPTION = """\
Time the ops against a copy that moves as many bytes (half read, half written), in the same run and
in turns. The default is a first look of 20 seconds: mask_pack, scatter_unpack and row_pack at one
size, with a sentence each. --all, or any option of the long tables, prints a table of every op
instead. Its column `of copy` is the copy's time over the op's: 100 % is as fast as a copy.

The tables also time the eager backend and other methods. For mask_pack: exact torch.topk, DGC's
sampled top-k and random-k, all with error feedback, and a cast to bfloat16. For quantize_pack: that
cast, PowerSGD's two products, and FBGEMM's rows of 64. For row_pack: torch.topk. For row_quantize
and row_dequantize on the CPU: FBGEMM's rows of 8 and 4 bits. On a GPU with nvcc also a copy kernel,
cub::DeviceSelect, and a bisection per row as in RTop-K. Every result is checked before it is timed.
On a GPU, times are those of the device.
"""
EPILOG = """\
examples:
  python -m bench.kernels
      the first look
  python -m bench.kernels --all
      every op in a table, some minutes
  python -m bench.kernels --sizes 16777216 --density 0.01
  python -m bench.kernels --device cuda --sizes 1048576,16777216,268435456 --density 0.001,0.01
  python -m bench.kernels --ops row_pack,row_unpack --row-widths 64,128,256,512,1024
"""


def parser() -> Parser:
    """Exits with status 2 and a text that names argument, rule and value."""
    parser = Parser(prog="python -m bench.kernels", description=DESCRIPTION, epilog=EPILOG)
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if cuda else "cpu",
        help="where the ops run; cuda if there is a GPU",
    )
    parser.add_argument(
        "--threads",
        type=number(int, lambda n: 1 <= n <= 1024, "an integer in [1, 1024]"),
        metavar="N",
        help="of the CPU, for all that is timed there (default: 1 for the first look, which is "
        f"then steady on busy cores, too; {torch.get_num_threads()} for the tables)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all that is measured to this file"
    )
    tables = parser.add_argument_group("long tables (any of these makes them)")
    tables.add_argument("--all", action="store_true", help="every op, with these defaults")
    tables.add_argument(
        "--ops",
        type=several(str, TIMED),
        metavar="OP,...",
        help=f"which of {', '.join(TIMED)} (default: all)",
    )
    tables.add_argument(
        "--sizes",
        type=several(count),
        metavar="N,...",
        help="elements; of the row ops on the CPU a quarter, and none where the widest row is "
        f"longer (default: {_shown('sizes')})",
    )
    tables.add_argument(
        "--density",
        type=several(density),
        metavar="F,...",
        help="fraction of entries kept; of row_pack and row_unpack always 0.05 "
        f"(default: {_shown('density')})",
    )
    tables.add_argument(
        "--row-widths",
        type=several(count),
        metavar="N,...",
        help=f"entries of a row, for the row ops (default: {_shown('row_widths')})",
    )
    tables.add_argument("--no-peers", action="store_true", help="only our backends and the copy")
    tables.add_argument("--graphs", action="store_true", help="replay CUDA graphs of our backends")
    tables.add_argument(
        "--rounds",
        type=count,
        metavar="N",
        help=f"turns of every fast call (default: {DEFAULTS['rounds']})",
    )
    return parser


def settle(options: argparse.Namespace) -> bool:
    """Whether the first look is asked for: no option of the tables is. Their defaults are set."""
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
