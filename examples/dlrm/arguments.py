"""The command line of train_dlrm.py, and the options that other programs share with it."""

import argparse
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from dct_parallel.exchange.quantized import QUANTIZED_FORMATS as FEW_BITS
from dct_parallel.exchange.settings import FORMATS
from dct_parallel.formats import ROW_FORMATS

from .loop import OPTIMIZERS, RATES
from .modes import MODES, START_STEP
from .options import Formatter, count, fraction, number, positive

DESCRIPTION = """\
Train DLRM, a click model, with several ways of exchanging gradients, and compare quality and bytes.
For each seed, all modes use equal initial weights and batches.
"""
ADAMW = "--optimizer adamw --format int4"
EPILOG = f"""\
examples:
  python examples/train_dlrm.py
      generated rows on 2 local ranks, dense compared with DCT
  python examples/train_dlrm.py {ADAMW}
      the same comparison with AdamW; DCT sends all entries in 4 bits
  python examples/train_dlrm.py --data train.txt.gz --modes dense,bf16,powersgd,dct --seeds 3
      a file in Criteo's format, all modes, mean and spread of 3 seeds
  python examples/train_dlrm.py --parallel hybrid --row-format int4 --dedup
      embedding tables sharded over the ranks; each distinct row is sent once, in 4 bits
  torchrun --nproc-per-node 2 examples/train_dlrm.py --data train.txt.gz
      ranks started by torchrun, on one machine or several
"""
# (option, required option, values of the required option that permit `option`, `option`'s default).
NEEDS = (
    ("row_format", "parallel", ("hybrid",), None),
    ("row_density", "parallel", ("hybrid",), 0.05),
    ("dedup", "parallel", ("hybrid",), False),
    ("density", "format", tuple(name for name in FORMATS if name not in FEW_BITS), 0.005),
)


table_size = number(int, lambda n: 2 <= n < 2**31, "an integer in [2, 2^31)")


def names(known: Collection[str], most: int) -> Callable[[str], tuple[str, ...]]:
    """An argparse type: up to `most` distinct known names, separated by commas."""

    def parse_names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if len(found) > most or not set(found) <= set(known):
            rule = f"must be 1 to {most} of {', '.join(known)}, joined by ','"
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
        return found

    return parse_names


def make_parser(prog: str, description: str, epilog: str, rows: int) -> argparse.ArgumentParser:
    """Make a parser with the options for data. `rows` is the default of --rows."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [OPTION ...]",
        description=description,
        epilog=epilog,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="rows in Criteo's format, gzip-compressed or not. A row has a label, 13 integers and "
        "26 categoricals, separated by tabs. An empty field is a missing value. Every rank keeps "
        "its share of the rows in memory (157 bytes per row)",
    )
    parser.add_argument(
        "--rows",
        type=count,
        default=rows,
        metavar="N",
        help="number of rows to generate without FILE; 20 %% of all rows are test rows",
    )
    parser.add_argument("--batch-size", type=count, default=128, help="rows per rank and step")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options. On an error, print the option, rule and value, and exit with status 2."""
    parser = make_parser("train_dlrm.py", DESCRIPTION, EPILOG, rows=400_000)
    add = parser.add_argument
    add("--ranks", type=count, default=2, help="number of local processes, without torchrun")
    add("--hash-size", type=table_size, default=4000, help="maximum rows per table")
    add("--embedding-dim", type=count, default=16, help="width of an embedding")
    add(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        default="sgd",
        help="optimizer of the MLPs: SGD, SGD with momentum 0.9, or AdamW",
    )
    rates = ", ".join(f"{rate:g} for {name}" for name, rate in RATES.items())
    add("--lr", type=positive, help=f"learning rate of the MLPs (default: {rates})")
    add(
        "--embedding-lr",
        type=positive,
        default=0.1,
        help="learning rate of the embedding tables, which use SGD",
    )
    add("--seeds", type=count, default=1, help="runs per mode, with seeds 0 ... SEEDS-1")
    add(
        "--parallel",
        choices=("data", "hybrid"),
        default="data",
        help="data: every rank has all weights. hybrid: every rank has the MLPs and a share of the "
        "embedding tables; ranks exchange embeddings and their gradients",
    )
    add(
        "--modes",
        type=names(MODES, len(MODES)),
        default="dense,dct",
        help=f"some of {','.join(MODES)}. dense and bf16 average gradients with an all-reduce, "
        "powersgd uses rank-1 PowerSGD, and dct uses dct_hook. powersgd and dct compress from step "
        f"{START_STEP} on. With hybrid, dense and powersgd send rows in float32, bf16 "
        "sends rows in bfloat16, and dct sends rows in the format of the options below",
    )
    add(
        "--density",
        type=fraction,
        help="DCT: fraction of the gradient entries sent per step (default: 0.005)",
    )
    add(
        "--format",
        choices=FORMATS,
        default="bfloat16",
        help=f"DCT: number format of gradients. With {', '.join(FEW_BITS)}, all entries are sent",
    )
    add(
        "--refresh-every",
        type=count,
        default=1,
        metavar="L",
        help="DCT: sample thresholds in every L-th step (default: 1; the paper: thousands)",
    )
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument(
        "--row-density",
        type=fraction,
        help="DCT with hybrid: fraction of entries that is sent in bfloat16, for each "
        "row and for its gradient; the number of entries is rounded up (default: 0.05)",
    )
    rows.add_argument(
        "--row-format",
        type=names(ROW_FORMATS, 2),
        metavar="FORMAT[,BACKWARD]",
        help="DCT with hybrid: send all entries of a row in FORMAT, and all entries of "
        f"its gradient in BACKWARD (default: FORMAT). Formats: {', '.join(ROW_FORMATS)}",
    )
    add(
        "--dedup",
        action="store_true",
        help="hybrid: send each row once per rank, even if several samples of a batch use the row",
    )
    add("--out", type=Path, default=Path("runs/dlrm"), metavar="DIR", help="folder for results")
    add("--overwrite", action="store_true", help="replace the results in DIR")
    options = parser.parse_args(arguments)
    options.lr = options.lr or RATES[options.optimizer]
    for name, needed, values, default in NEEDS:
        given, got = getattr(options, name), getattr(options, needed)
        if given and got not in values and not (name == "density" and given == 1):
            option = name.replace("_", "-")
            parser.error(f"--{option} must come with --{needed} {' or '.join(values)}, got {got}")
        if not given:
            setattr(options, name, default)
    if options.format in FEW_BITS:
        options.density = 1.0
    return options
