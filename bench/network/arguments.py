"""The command line of bench/link.py."""

from dlrm.argument_types import count, density, number, positive, row_format, several, widths
from dlrm.command_line import Formatter, Parser, add_out, add_version
from rates import parse_rate

from .methods import METHODS, REPLICATED

ROUNDS = 3  # every mode gets a third of its steps in each, so that a busy moment hits all of them

DESCRIPTION = """\
Train DLRM on generated rows over links of a set rate, with several ways of averaging gradients,
and measure a step: its time, where that goes, and the bytes that leave a rank's interface.

Every rank is a process in a network namespace of its own, or several are in one (--local-size), as
on a node of a cluster. A link is a veth pair with a token bucket filter at both ends (each
direction has the full rate), and a bridge joins them. Bytes are read from the interface's counters.
Needs root and the commands ip and tc (Debian, Ubuntu: apt-get install iproute2); --loopback
measures without them, and without a rate limit. What was set up is removed at the end, also after
Ctrl-C; what a killed run left is removed by the next.
"""
EPILOG = """\
examples:
  sudo $(which python) bench/link.py
      2 ranks, 100 Mbit/s to unlimited, all replicated modes: about 6 minutes
  sudo $(which python) bench/link.py --ranks 2,4 --rates 1gbit,5gbit,10gbit --modes dense,bf16,dct
      where does DCT stop paying?
  sudo $(which python) bench/link.py --embedding-dim 64 --modes hybrid-dense,hybrid-dp,hybrid-dct
      tables sharded: what DCT on the exchange of embeddings adds to DCT on gradients
  sudo $(which python) bench/link.py --embedding-dim 64 --rates 1gbit --row-format int4,ternary \\
      --modes hybrid-dense,hybrid-dense-dedup,hybrid-dct,hybrid-format-dedup
      rows in few bits, each distinct one once; where counts and ids of rows stand in a step
  sudo $(which python) bench/link.py --ranks 2 --rates 1gbit --modes bf16,dct,dct-reduce-scatter
      the transports, on one link
  sudo $(which python) bench/link.py --ranks 4 --local-size 2 --modes dense,bf16,dct,dct-mesh
      2 nodes of 2 ranks, the links between them of these rates
  python bench/link.py --loopback
      no root: what the modes cost where the network costs next to nothing

DIR receives link.json (everything, with provenance) and step_time.png.
`python bench/scale.py --validate DIR/link.json` holds the cost model against it.
"""
FOLDER, RESULT = "runs/link", "link.json"


def parser() -> Parser:
    """Exits with status 2 and a text that names argument, rule and value."""
    parser = Parser(
        prog="link.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=Formatter
    )
    add_version(parser)
    measured = parser.add_argument_group("what is measured")
    measured.add_argument(
        "--ranks",
        type=several(number(int, lambda n: 2 <= n <= 64, "an integer in [2, 64]")),
        default="2",
        metavar="N,...",
        help="rank counts; ranks share this machine's cores, so more of them than cores compute "
        "slower",
    )
    measured.add_argument(
        "--local-size",
        type=count,
        default=1,
        metavar="L",
        help="ranks of a node: they share an interface and its link, and reach each other without",
    )
    measured.add_argument(
        "--rates",
        type=several(parse_rate),
        metavar="R,...",
        help="link rates, such as 2.5gbit, or unlimited (default: 100mbit,1gbit,10gbit,unlimited; "
        "unlimited with --loopback)",
    )
    measured.add_argument(
        "--modes",
        type=several(str, METHODS),
        default=",".join(REPLICATED),
        metavar="M,...",
        help="float32 and bfloat16 all-reduce, PowerSGD of rank 1 and 2, exact top-k with error "
        "feedback (values and int32 indices in one all-gather), DCT with both transports, and with "
        "every entry in 4 bits (dct-int4); local, local-ternary, local-float32: no DDP, weights "
        "averaged every 10 steps, by their largest changes or every change in ternary or float32, "
        "and a step is the mean of ten; dct-mesh, "
        "dct-mesh-reduce-scatter: the gradients of a node's ranks whole inside it, and DCT between "
        "nodes; with embedding tables "
        "sharded over the ranks: hybrid-dense sends rows and gradients as float32, hybrid-dp has "
        "DCT on the MLPs' gradients, hybrid-dct on rows, too; hybrid-format has DCT on gradients "
        "and rows in few bits; with -dedup each distinct row of a rank's batch crosses once",
    )
    measured.add_argument(
        "--loopback",
        action="store_true",
        help="127.0.0.1 instead of namespaces and links: no root, no rate limit, and bytes that "
        "include all else that this machine sends to itself",
    )
    extent = parser.add_argument_group("how long")
    extent.add_argument(
        "--steps", type=count, default=60, help=f"timed steps per cell, in {ROUNDS} rounds"
    )
    extent.add_argument(
        "--seconds",
        type=positive,
        default=15.0,
        help="a cell's timed steps take about this at most; slow links get fewer, at least 15",
    )
    extent.add_argument(
        "--timeout",
        type=positive,
        default=120.0,
        help="seconds after which a round of a cell, warm-up included, is given up and its ranks "
        "killed",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--bucket-mb",
        type=positive,
        default=1024.0,
        help="DDP's bucket size in MiB; the default makes one bucket. With several, exchanges run "
        "beside the backward pass: step times hold, where they go is said for one bucket alone",
    )
    model.add_argument("--batch-size", type=count, default=128, help="rows per rank and step")
    model.add_argument("--hash-size", type=count, default=4000, help="rows of a table at most")
    model.add_argument("--embedding-dim", type=count, default=16, help="width of an embedding")
    mlp = {"type": widths, "metavar": "W-W-..."}
    model.add_argument("--bottom", default="512-256-64", help="bottom MLP's hidden widths", **mlp)
    model.add_argument("--top", default="512-256", help="top MLP's hidden widths", **mlp)
    model.add_argument(
        "--density",
        type=density,
        default=0.005,
        help="DCT and exact top-k: fraction of entries sent",
    )
    model.add_argument(
        "--row-density",
        type=density,
        default=0.05,
        help="hybrid-dct: fraction of each pooled embedding sent, and of its gradient, rounded up",
    )
    model.add_argument(
        "--row-format",
        type=row_format,
        default="int4",
        metavar="FORMAT[,BACKWARD]",
        help="hybrid-format: number format of pooled embeddings, and of their gradients if that "
        "is another",
    )
    add_out(parser, FOLDER, RESULT)
    return parser
