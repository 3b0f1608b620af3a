"""The command line of bench.kernels."""

import argparse
from pathlib import Path

import torch

from bench.cli import Parser, count, density, number, several

TIMED = ("mask_pack", "sample_threshold", "scatter_unpack")
TIMED += ("quantize_pack", "dequantize_sum", "dequantize_sum_pack")
TIMED += ("row_pack", "row_unpack", "row_quantize", "row_dequantize", "row_dequantize_sum")
ROUNDS = 5  # turns per fast call. In each turn, the call is timed on every buffer set.
# Defaults of the long tables. argparse uses None, to detect whether any of the options is given.
DEFAULTS = {
    "ops": TIMED,
    "sizes": (2**24,),
    "density": (0.01,),
    "row_widths": (64, 256, 1024),
    "rounds": ROUNDS,
}

DESCRIPTION = """\
Compare the time of each op with a copy that moves the same number of bytes (half read, half
written). Calls are timed in turns. The default takes 20 seconds: it times mask_pack, scatter_unpack
and row_pack at one size, and prints one sentence for each. With --all, or any option of the long
tables, a table of all ops is printed. Its column `of copy` is the copy's time divided by the op's
time; 100 % is as fast as a copy.

The tables also include the eager backend and other methods. mask_pack is compared with exact
torch.topk, DGC's sampled top-k and random-k, all with error feedback, and with a cast to bfloat16.
quantize_pack is compared with the same cast, PowerSGD's two products, and FBGEMM's rows of 64. The
peer of row_pack is torch.topk. On the CPU, row_quantize and row_dequantize are compared with FBGEMM
(8 and 4 bits). On a GPU with nvcc, the tables add a copy kernel, cub::DeviceSelect and RTop-K's
bisection. All results are checked before calls are timed. On a GPU, times are device times.
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
    """Make the parser. On errors it exits with status 2 and prints argument, rule and value."""
    parser = Parser(prog="python -m bench.kernels", description=DESCRIPTION, epilog=EPILOG)
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if cuda else "cpu",
        help="device of the ops; cuda if there is a GPU",
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
        help="elements; row ops use a quarter on the CPU, and skip sizes smaller than the widest "
        f"row (default: {_shown('sizes')})",
    )
    tables.add_argument(
        "--density",
        type=several(density),
        metavar="F,...",
        help="fraction of entries kept; row_pack and row_unpack always use 0.05 "
        f"(default: {_shown('density')})",
    )
    tables.add_argument(
        "--row-widths",
        type=several(count),
        metavar="N,...",
        help=f"entries per row, for the row ops (default: {_shown('row_widths')})",
    )
    tables.add_argument("--no-peers", action="store_true", help="only our backends and the copy")
    tables.add_argument("--graphs", action="store_true", help="replay CUDA graphs of our backends")
    tables.add_argument(
        "--rounds",
        type=count,
        metavar="N",
        help=f"turns of each fast call (default: {DEFAULTS['rounds']})",
    )
    return parser


def settle(options: argparse.Namespace) -> bool:
    """Set defaults. Return whether to time only the first look (no table option was given)."""
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
