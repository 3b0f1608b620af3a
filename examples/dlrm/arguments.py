"""The command line of train_dlrm.py."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from dct_parallel.compressor import POLICIES
from dct_parallel.exchange.codec import FORMATS
from dct_parallel.exchange.quantized import FEW_BITS
from dct_parallel.exchange.selection import TRANSPORTS
from dct_parallel.rows.counts import ROW_FORMATS

from . import option_rules
from .argument_types import count, density, number, positive, row_format, several, widths, zipf
from .command_line import Formatter, Parser, add_out, add_two_helps, add_version
from .launch import under_torchrun
from .models.factorised import FACTORISED
from .modes import MODES, START_STEP
from .optimizers import EMBEDDING_OPTIMIZERS, OPTIMIZERS, SCALED

DESCRIPTION = """\
Train DLRM, a click model, with several ways of exchanging gradients, and compare quality, bytes on
the wire and step time. All modes of a seed start from the same weights and see the same batches. At
the end of a run all weights that several ranks have must be equal, bit for bit.
"""
EPILOG = """\
examples:
  python examples/train_dlrm.py
      rows from the generator, 2 local ranks, dense beside DCT
  python examples/train_dlrm.py --modes dense,bf16,powersgd,dct --density 0.01 --seeds 3
      every mode, mean and spread of 3 seeds
  python examples/train_dlrm.py --data train.txt.gz --hash-size 100000
      Criteo's file
  python examples/train_dlrm.py --parallel hybrid --row-density 0.05
      embedding tables sharded over the ranks; DCT on their rows and on the MLPs' gradients
  python examples/train_dlrm.py --parallel hybrid --row-format int4 --dedup
      the same with rows in 4 bits an entry, each distinct row once
  python examples/train_dlrm.py --parallel 2d --ranks 4 --replicas 2 --sync-every 10 \\
      --embedding-optimizer momentum_scaled_rowwise_adagrad
      2 replicas of the tables, each shared by 2 ranks, averaged every 10 steps
  python examples/train_dlrm.py --parallel des --model deepfm --multi-hot 10 --dynamic-rows 100000
      DeepFM by the sums of partial results, on rows that appear in training
  torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr HOST --master-port 29500 \\
      examples/train_dlrm.py --data train.txt.gz
      the same on the ranks that torchrun starts; on the second machine with --node-rank 1
  python examples/train_dlrm.py --seeds 5 --out runs/five --checkpoint-every 500 --resume
      started again after whatever ended it, it goes on, and ends as if nothing had happened

DIR receives summary.json (results), history.json (per step) and curves.png, anew after every run of
a mode and a seed: what an interrupted command has finished is kept.
"""
# What --help shows; --help-all shows the rest as well.
MOST = (
    *("--data", "--rows", "--ranks", "--epochs", "--batch-size", "--lr", "--optimizer", "--seeds"),
    *("--parallel", "--modes", "--density", "--out"),
)
EPILOG_OF_MOST = """\
examples:
  python examples/train_dlrm.py
      rows from the generator, 2 local ranks, dense beside DCT
  python examples/train_dlrm.py --data train.txt.gz --modes dense,bf16,powersgd,dct --seeds 3
      Criteo's file, every mode, mean and spread of 3 seeds

All other options (tables, rows in few bits, transports, restarts, torchrun): --help-all
"""
FOLDER, RESULT = "runs/dlrm", "summary.json"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; exits with status 2 and a text that names argument, rule and value."""
    parser = Parser(
        prog="train_dlrm.py",
        usage="%(prog)s [-h] [--help-all] [OPTION ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Formatter,
        add_help=False,
    )
    add_two_helps(parser, MOST, EPILOG_OF_MOST)
    add_version(parser)
    fraction = number(float, lambda x: 0 < x < 1, "a number in (0, 1)")

    data = parser.add_argument_group("data")
    source = data.add_mutually_exclusive_group()
    source.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="rows in Criteo's layout, tab-separated: label, 13 integers, 26 categoricals, empty = "
        "missing; gzip-compressed or not. Every rank reads the file and keeps its share in memory, "
        "157 bytes a row",
    )
    source.add_argument(
        "--rows",
        type=count,
        default=1_000_000,
        metavar="N",
        help="without FILE: rows to generate, training and test together",
    )
    data.add_argument(
        "--data-format",
        choices=("criteo", "movielens"),
        default="criteo",
        help="layout of FILE: as above, or MovieLens 100K's u.data: user, item, rating, time. Its "
        "label is a rating of 4 or 5, its features are user, item and up to 20 items liked before",
    )
    data.add_argument(
        "--multi-hot",
        type=count,
        default=1,
        metavar="N",
        help="without FILE: up to N values of each categorical in a row",
    )
    data.add_argument(
        "--zipf",
        type=zipf,
        metavar="TABLES,ROWS,S",
        help="without FILE: in the place of 26 categoricals like Criteo's, some of which are "
        "missing, TABLES that never are, each with a table of ROWS rows; value v has a probability "
        "of about (v + 1)^-S",
    )
    data.add_argument(
        "--max-malformed",
        type=number(float, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
        default=0.01,
        metavar="F",
        help="fraction of FILE's lines that may be malformed; they are left out, and told",
    )
    data.add_argument(
        "--test-fraction",
        type=fraction,
        default=0.2,
        metavar="F",
        help="fraction of the rows kept for the test, chosen by a hash of the row number",
    )
    data.add_argument(
        "--validation-fraction",
        type=number(float, lambda x: 0 <= x < 1, "a number in [0, 1)"),
        default=0.0,
        metavar="F",
        help="fraction of the rows kept for choosing settings by, chosen by the same hash: neither "
        "trained on nor among the test rows, with scores of their own",
    )

    training = parser.add_argument_group("training")
    training.add_argument(
        "--ranks", type=count, default=2, help="local processes; under torchrun, torchrun's count"
    )
    training.add_argument("--epochs", type=count, default=1, help="passes over the training rows")
    training.add_argument("--batch-size", type=count, default=128, help="rows per rank and step")
    training.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        default="sgd",
        help="of the MLPs: SGD, SGD with a momentum of 0.9, AdamW (want a --lr of their own: 0.1, "
        "0.01 and 0.001 are usual)",
    )
    training.add_argument("--lr", type=positive, default=0.1, help="learning rate")
    training.add_argument(
        "--embedding-optimizer",
        choices=tuple(EMBEDDING_OPTIMIZERS),
        default="sgd",
        help="of the embedding tables: SGD, or AdaGrad with one accumulator a row; 2d: also with "
        "accumulators divided by REPLICAS",
    )
    training.add_argument(
        "--delayed-accumulator",
        action="store_true",
        help=f"{SCALED}: divide by accumulators as of the last sync",
    )
    training.add_argument(
        "--embedding-lr",
        type=positive,
        metavar="LR",
        help="learning rate of the embedding tables; without it, that of all",
    )
    training.add_argument(
        "--seeds", type=count, default=1, help="runs per mode, with seeds 0 ... SEEDS-1"
    )

    restart = parser.add_argument_group("restart")
    restart.add_argument(
        "--checkpoint-every",
        type=count,
        metavar="N",
        help="steps between checkpoints in DIR, which every rank must see then; the last one stays",
    )
    restart.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in DIR (--out), if there is one, to the same results, bit "
        "for bit",
    )

    exchange = parser.add_argument_group("exchange between ranks")
    exchange.add_argument(
        "--parallel",
        choices=("data", "hybrid", "2d", "des"),
        default="data",
        help="data: every rank has all weights. hybrid: the MLPs and a share of the embedding "
        "tables; ranks exchange pooled embeddings and their gradients. 2d: groups of ranks share "
        "the tables, each group has a replica, and replicas are averaged. des (distributed "
        "equivalent substitution): ranks share the rows of every table and send partial results",
    )
    exchange.add_argument(
        "--replicas", type=count, default=2, metavar="R", help="2d: groups of ranks"
    )
    exchange.add_argument(
        "--sync-every",
        type=count,
        default=1,
        metavar="N",
        help="2d: steps from one sync of the replicas to the next",
    )
    exchange.add_argument(
        "--modes",
        type=several(str, MODES),
        default="dense,dct",
        help=f"some of {','.join(MODES)}: gradients by float32 all-reduce, bfloat16 all-reduce, "
        f"PowerSGD of rank 1, DCT; the last two compress from step {START_STEP} on. Pooled "
        "embeddings, and syncs: as float32, bfloat16, float32, DCT",
    )
    exchange.add_argument(
        "--density",
        type=density,
        default=0.005,
        help="DCT: fraction of the gradient entries sent per step",
    )
    rows = exchange.add_mutually_exclusive_group()
    rows.add_argument(
        "--row-density",
        type=density,
        default=0.05,
        help="hybrid, 2d, DCT: fraction of each pooled embedding sent, and of its gradient, "
        "rounded up",
    )
    rows.add_argument(
        "--row-format",
        type=row_format,
        metavar="FORMAT[,BACKWARD]",
        help="hybrid, 2d, DCT: instead, every entry of a pooled embedding in one number format, of "
        f"its gradient in the same or another; of {', '.join(ROW_FORMATS)}",
    )
    synced = exchange.add_mutually_exclusive_group()
    synced.add_argument(
        "--sync-density",
        type=density,
        default=0.01,
        help="2d, DCT: fraction of what changed in the tables sent at a sync; the rest waits",
    )
    synced.add_argument(
        "--sync-format",
        choices=FORMATS,
        help="2d, DCT: instead, all of what changed, in this number format",
    )
    exchange.add_argument(
        "--dedup",
        action="store_true",
        help="hybrid, 2d, every mode: a row that several samples of a rank's batch ask for crosses "
        "once, and the sum of its gradients",
    )
    exchange.add_argument(
        "--format",
        choices=FORMATS,
        default="bfloat16",
        help="DCT: of what is sent; int8, int4 and ternary send every entry, whatever DENSITY",
    )
    exchange.add_argument(
        "--refresh-every",
        type=count,
        default=1000,
        metavar="L",
        help="DCT, --policy fixed: steps between samples of the thresholds",
    )
    exchange.add_argument(
        "--policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="DCT: thresholds are sampled in every step, or in every L-th as in the paper",
    )
    exchange.add_argument(
        "--transport",
        choices=tuple(TRANSPORTS),
        help="DCT: gradients by an all-gather of everything, or to owners of ranges, who sum and "
        "compress once more (default: by ranks and size of buckets, see DCTState)",
    )
    exchange.add_argument(
        "--local-size",
        type=count,
        default=1,
        metavar="L",
        help="DCT: ranks of a node. Gradients cross whole inside it, and compressed, a part from "
        "each rank, between nodes",
    )
    exchange.add_argument(
        "--bucket-mb",
        type=count,
        default=1024,
        metavar="MB",
        help="DDP's bucket size in MiB, for all modes; the default makes one bucket, because "
        "PowerSGD can hang on gloo with several",
    )

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        choices=("dlrm", *FACTORISED),
        default="dlrm",
        help="DLRM, logistic regression, a factorisation machine, or DeepFM (its MLP: --top)",
    )
    model.add_argument(
        "--hash-size",
        type=number(int, lambda n: 2 <= n < 2**31, "an integer in [2, 2^31)"),
        default=4000,
        help="rows of an embedding table at most; with fewer values, one row per value",
    )
    model.add_argument(
        "--dynamic-rows",
        type=number(int, lambda n: 1 <= n < 2**31 - 1, "an integer in [1, 2^31 - 2]"),
        metavar="N",
        help="des: instead of tables of such a size, whose rows several values share, a row for "
        "each value, from when it is first trained on; up to N on a rank, for which memory is "
        "reserved",
    )
    model.add_argument("--embedding-dim", type=count, default=16, help="width of an embedding")
    model.add_argument(
        "--bottom",
        type=widths,
        default="512-256-64",
        help="hidden widths of the bottom MLP, between the 13 integers and EMBEDDING_DIM",
    )
    model.add_argument(
        "--top",
        type=widths,
        default="512-256",
        help="hidden widths of the top MLP, before its one output",
    )

    add_out(parser, FOLDER, RESULT)
    given, options = _given(parser, arguments)
    if options.test_fraction + options.validation_fraction >= 1:
        parser.error(
            "argument --validation-fraction: must leave rows to train on beside a --test-fraction "
            f"of {options.test_fraction:g}, got {options.validation_fraction:g}"
        )
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else options.ranks
    if ranks % options.local_size:
        parser.error(f"--local-size must divide the ranks, {ranks}, got {options.local_size}")
    said = option_rules.broken(given, options)
    if said is not None:
        parser.error(said)
    # As the summary is to have them:
    if options.data is not None:
        options.rows = None
    if options.format in FEW_BITS:
        options.density = 1.0
    return options


def _given(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[set[str], argparse.Namespace]:
    """Names of the options that are given, and all options with their values."""
    defaults, nothing = vars(parser.parse_args([])), object()
    found = parser.parse_args(arguments, argparse.Namespace(**dict.fromkeys(defaults, nothing)))
    given = {name: value for name, value in vars(found).items() if value is not nothing}
    return set(given), argparse.Namespace(**(defaults | given))
