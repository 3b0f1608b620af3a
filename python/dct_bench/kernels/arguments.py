"""The command line of dct-bench kernels."""

import argparse
from pathlib import Path

import torch

from dct_dlrm.argument_types import count, density, number, several
from dct_dlrm.command_line import Formatter

TIMED = ("mask_pack", "sample_threshold", "scatter_unpack")
TIMED += ("row_pack", "row_unpack", "row_quantize", "row_dequantize")
ROUNDS = 5  # turns of a fast call; each is timed on every buffer set

DESCRIPTION = """\
Time the ops against a copy that moves as many bytes (half read, half written), in the same run and
in turns, on buffers that no cache still holds; beside them the eager backend and peers: exact
torch.topk, DGC's sampled top-k and random-k, all with error feedback, and a cast to bfloat16 for
mask_pack; torch.topk for row_pack; FBGEMM's rows of 8 and 4 bits for row_quantize and
row_dequantize, on the CPU; on a GPU with nvcc also a copy kernel of our own,
cub::DeviceSelect and a bisection per row like RTop-K's. Nothing is timed before it was found right:
backends bit for bit equal to eager, peers by what they take and leave. On the GPU time is what the
device takes.

`of copy` is the copy's time over this one's: 100 % is as fast as memory is copied.
"""
EPILOG = """\
examples:
  dct-bench kernels --sizes 16777216 --density 0.01
  dct-bench kernels --device cuda --sizes 1048576,16777216,268435456 --density 0.001,0.01
  dct-bench kernels --ops row_pack,row_unpack --row-widths 64,128,256,512,1024
"""


def add_parser(subparsers: argparse._SubParsersAction, name: str) -> None:
    parser = subparsers.add_parser(
        name,
        help="the ops against a copy and against peers",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Formatter,
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--ops", type=several(str, TIMED), default=list(TIMED), help="joined by ','; default all"
    )
    parser.add_argument("--sizes", type=several(count), default=[2**24], help="elements")
    parser.add_argument("--density", type=several(density), default=[0.01], help="of entries kept")
    parser.add_argument("--row-widths", type=several(count), default=[64, 256, 1024])
    parser.add_argument("--no-peers", action="store_true", help="only our backends and the copy")
    parser.add_argument("--graphs", action="store_true", help="replay CUDA graphs of our backends")
    parser.add_argument("--rounds", type=count, default=ROUNDS, help="turns of every fast call")
    parser.add_argument(
        "--threads",
        type=number(int, lambda n: 1 <= n <= 1024, "an integer in [1, 1024]"),
        default=torch.get_num_threads(),
    )
    parser.add_argument("--seconds", type=count, help="begin no further case after so long")
    parser.add_argument("--json", type=Path, help="write everything to this file")
