"""The command line of bench/scale.py."""

import math
from pathlib import Path

from dlrm.argument_types import count, density, number, positive, several
from dlrm.command_line import Formatter, Parser, add_out, add_version
from rates import parse_rate

FOLDER, RESULT = "runs/scale", "scale.json"
# Of a step on one H100 in milliseconds, not measured. DLRM: a guess. Transformer: 6 x parameters x
# 8,192 tokens at 40 % of the data sheet's 989 Tflop/s.
ASSUMED_COMPUTE_MS = {"dlrm": 5.0, "transformer": 15.0}

DESCRIPTION = """\
Predict the time of a training step for 2 to thousands of ranks, at link rates of your choice, for
float32 and bfloat16 all-reduce, PowerSGD, DCT's hook (the largest entries, or every entry in
bfloat16, int8, int4 or ternary) and local steps (DCTAverager). With one number of ranks and one
rate the answer is a sentence: which method is fastest, and by how much.
With several it is tables: where DCT pays, and where it does not.

A step is compute + pack + wire + unpack. Links: alpha-beta model. Bytes: the formulas that the
training layer itself goes by. Nothing contends and nobody straggles, so all times are lower bounds.
The output names where each constant is from: what a message costs and how fast kernels are follow
--device and the rate. Less than 5 % apart is "as fast": then the first of the table is named.
"""
EPILOG = """\
examples:
  python bench/scale.py --parameters 25000000 --compute-ms 50 --ranks 2 --rates 1gbit
      does it help this model, on this link?
  python bench/scale.py --parameters 124000000 --compute-ms 200 --ranks 2 --rates 1gbit \\
      --optimizer adamw --device gpu
      what helps AdamW?
  python bench/scale.py --kernels runs/link/link.json --device cpu --compute-ms 8
      kernels as fast as python bench/link.py found them on this machine
  python bench/scale.py --model transformer --gpus-per-node 8 --rates 100gbit,200gbit,400gbit
      dense inside nodes of 8, DCT between them
  python bench/scale.py --validate runs/link/link.json
      predicted beside measured, for every cell of that run

DIR receives scale.json (everything, with provenance). The sentence alone writes nothing without
--out.
"""


def parser() -> Parser:
    """Exits with status 2 and a text that names argument, rule and value."""
    parser = Parser(
        prog="scale.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=Formatter
    )
    add_version(parser)
    not_negative = number(float, lambda x: 0 <= x < math.inf, "a number >= 0")
    model = parser.add_argument_group("model")
    which = model.add_mutually_exclusive_group()
    which.add_argument(
        "--model",
        choices=tuple(ASSUMED_COMPUTE_MS),
        default="dlrm",
        help="dlrm: as examples/train_dlrm.py has it; transformer: GPT-2",
    )
    which.add_argument(
        "--parameters",
        type=number(int, lambda n: 1 <= n < 2**32, "an integer in [1, 2^32)"),
        metavar="N",
        help="a model of your own, with so many parameters; needs --compute-ms. Without PowerSGD, "
        "whose bytes depend on their shapes",
    )
    model.add_argument(
        "--hash-size", type=count, default=4000, help="dlrm: rows of a table at most"
    )
    model.add_argument("--layers", type=count, default=12, help="transformer: blocks")
    model.add_argument("--width", type=count, default=768, help="transformer: model width")
    model.add_argument(
        "--density",
        type=density,
        default=0.005,
        help="DCT's sparse hook: fraction of entries sent",
    )
    model.add_argument(
        "--optimizer",
        choices=("sgd", "adamw"),
        default="sgd",
        help="adamw (or momentum) leaves out what is not for it: the sparse hook, ternary in every "
        "step, PowerSGD",
    )
    machine = parser.add_argument_group("machines")
    machine.add_argument(
        "--ranks",
        type=several(number(int, lambda n: 2 <= n <= 2**20, "an integer in [2, 2^20]")),
        default="2,8,32,128,512,2048,8192",
        metavar="P,...",
        help="rank counts, multiples of --gpus-per-node or below it",
    )
    machine.add_argument(
        "--rates",
        type=several(parse_rate),
        default="1gbit,10gbit,25gbit,100gbit,200gbit,400gbit",
        metavar="R,...",
        help="of a node's link, each direction",
    )
    machine.add_argument(
        "--alpha-us",
        type=not_negative,
        metavar="US",
        help="microseconds per message, on every link (default: cpu 1500, as gloo took on 2 busy "
        "cores; gpu, assumed, 50 below 100 Gbit/s and 10 from there)",
    )
    machine.add_argument(
        "--device",
        choices=("gpu", "cpu"),
        help="where gradients are: NCCL and an H200's kernels, or gloo and those of 2 CPU cores "
        "(default: gpu if torch sees one here)",
    )
    machine.add_argument(
        "--gpus-per-node", type=count, default=1, metavar="G", help="ranks that share a node's link"
    )
    machine.add_argument(
        "--inside-gbytes",
        type=positive,
        metavar="GB",
        help="GB/s of a rank's links inside its node, each direction (default: gpu 450, NVLink 4's "
        "by the data sheet of the H100, 900 both ways; cpu 10, assumed)",
    )
    machine.add_argument(
        "--compute-ms",
        type=positive,
        metavar="MS",
        help="forward, backward and optimizer of a step (default: assumed, "
        f"{' or '.join(f'{ms:g} for {name}' for name, ms in ASSUMED_COMPUTE_MS.items())})",
    )
    machine.add_argument(
        "--overlap",
        type=number(float, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
        default=0.0,
        metavar="F",
        help="fraction of compute behind which the wire can hide: 0 for one bucket, up to the "
        "share of the backward pass with many",
    )
    machine.add_argument(
        "--kernels",
        type=Path,
        metavar="JSON",
        help="of kernels.py or link.py: how fast kernels were measured to be",
    )
    parser.add_argument(
        "--validate",
        type=Path,
        metavar="JSON",
        help="of link.py, or such a run in bench/results: print predicted beside measured step "
        "times, and nothing else",
    )
    add_out(parser, FOLDER, RESULT)
    return parser
