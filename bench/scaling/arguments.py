"""The command line of bench.scale."""

import math

from bench.cli import Parser, density, number, positive, several
from bench.rates import parse_rate

DESCRIPTION = """\
Predict the time of a training step for float32 and bfloat16 all-reduce, DCTState and DCTAverager.
With one number of ranks and one rate, the answer is a table and a sentence: which method is
fastest, and by how much. With several, it is a table of the fastest methods.

A step is compute + pack + wire + unpack; docs/design/measuring.md has the formulas. Bytes are those
of dct_parallel. No message waits for another and no rank is slow, so all times are lower bounds.
Methods that differ by less than 5 % count as equally fast.
"""
EPILOG = """\
examples:
  python -m bench.scale --parameters 25000000 --compute-ms 50 --ranks 2 --rates 1gbit
      does it help this model, on this link?
  python -m bench.scale --parameters 124000000 --compute-ms 200 --ranks 2 --rates 1gbit \\
      --optimizer adamw --device gpu
      what helps with AdamW?
"""


def parser() -> Parser:
    """Exits with status 2 and a text that names argument, rule and value."""
    parser = Parser(prog="python -m bench.scale", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add(
        "--parameters",
        type=number(int, lambda n: 1 <= n < 2**32, "an integer in [1, 2^32)"),
        default=25_000_000,
        help="of the model",
    )
    add(
        "--compute-ms",
        type=positive,
        default=50.0,
        help="milliseconds of forward, backward and optimizer in a step",
    )
    add("--density", type=density, default=0.005, help="of the sparse hook: entries sent")
    add(
        "--optimizer",
        choices=("sgd", "adamw"),
        default="sgd",
        help="adamw (or momentum) leaves out the sparse hook and the ternary hook, whose loss is "
        "higher with it",
    )
    add(
        "--ranks",
        type=several(number(int, lambda n: 2 <= n <= 2**20, "an integer in [2, 2^20]")),
        default="2,8,32,128,512",
        metavar="P,...",
        help="numbers of ranks",
    )
    add(
        "--rates",
        type=several(parse_rate),
        default="1gbit,10gbit,25gbit,100gbit,400gbit",
        metavar="R,...",
        help="of a rank's link, in each direction",
    )
    add(
        "--device",
        choices=("gpu", "cpu"),
        help="NCCL and the kernels of an H200, or gloo and those of 2 CPU cores (default: gpu if "
        "torch finds one)",
    )
    add(
        "--alpha-us",
        type=number(float, lambda x: 0 <= x < math.inf, "a number >= 0"),
        metavar="US",
        help="microseconds per message (default: cpu 1500; gpu 50 below 100 Gbit/s, 10 from there)",
    )
    add(
        "--overlap",
        type=number(float, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
        default=0.0,
        metavar="F",
        help="fraction of compute behind which the wire can hide: 0 for one bucket, up to the "
        "share of the backward pass with many",
    )
    return parser
