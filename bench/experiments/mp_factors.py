"""How many fewer bytes the hybrid DLRM's rows have, by batch size: counted on the data.

    python -m experiments.mp_factors --data ROWS.tsv --embedding-dim 64 --batches 64,512,2048
    python -m experiments.mp_factors --ranks 4 --exchanges int4,int4+dedup int4,sign+dedup

Nothing is trained: batches of the training rows, up to 200 of each size, are gone through in random
order, and the distinct rows that a rank needs from others are counted. What such a row and its
gradient have in bytes follows from the exchange (names as in mp_formats.py). Prints a table:

    rows       that cross to a rank in a step, where every sample asks for its own
    distinct   of them, and how many times fewer these are
    ids        bytes of ids and counts with distinct rows, and without
    EXCHANGE   times fewer bytes of rows, both ways, than float32 (than float32 with distinct rows)

Other options are those of train_dlrm.py.
"""

import argparse
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dct_embeddings import plan_shards
from dct_embeddings.distinct import distinct
from dlrm import arguments
from dlrm.argument_types import count, several
from dlrm.command_line import Formatter, Parser, exit_status
from dlrm.data import dataset
from dlrm.data.features import Rows
from dlrm.errors import UsageError
from dlrm.launch import launch

from .mp_formats import NAMES, Kind, exchange_name

MOST = 200  # batches of a size
DEDUP = [name for name in NAMES if name.endswith("+dedup")]


def work(options: argparse.Namespace, args: argparse.Namespace) -> None:
    """Counts on one rank; the first prints the mean over all."""
    data = dataset.load(options)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plan = plan_shards(data.tables, ranks)
    others = [shard.table for r, own in enumerate(plan) if r != rank for shard in own]
    lines = []
    for batch in args.batches:
        wanted = distinct_rows(data.train, batch, others)
        counts = 32 * (ranks - 1)  # to each other rank, how many, and what must be the same
        mean = torch.tensor([float(batch * len(others)), wanted, counts])
        dist.all_reduce(mean)
        lines.append(line(batch, *(mean / ranks).tolist(), args.exchanges, options.embedding_dim))
    if rank == 0:
        headings = ["batch a rank", "rows", "distinct", "ids and counts", *args.exchanges]
        print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
        print("\n".join(lines))


def distinct_rows(rows: Rows, batch: int, tables: Sequence[int]) -> float:
    """Distinct rows of `tables` in a batch, the mean over batches."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    ids = rows.ids[:, list(tables)]
    batches = [index for index in order.split(batch)[:MOST] if len(index) == batch]
    if not batches:
        rule = f"--batches must be at most the training rows of a rank, {len(rows)}"
        raise UsageError(f"{rule}, got {batch}")
    columns = torch.arange(len(tables))
    return statistics.mean(len(distinct(ids[index], columns, len(tables))[0]) for index in batches)


def line(
    batch: int, rows: float, wanted: float, counts: float, names: Sequence[str], width: int
) -> str:
    """A line of the table."""
    cells = [f"{batch:,}", f"{rows:,.0f}", f"{wanted:,.0f}: {rows / wanted:.2f}x"]
    cells.append(f"{4 * wanted + counts:,.0f}, without {8 * rows + counts:,.0f}")
    for name in names:
        kind = Kind.parse(name)
        sent = (wanted if kind.dedup else rows) * sum(kind.row_bytes(width))
        cells.append(f"{8 * width * rows / sent:.1f}x ({8 * width * wanted / sent:.1f}x)")
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    return exit_status("mp_factors", _main)


def _main() -> None:
    parser = Parser(prog="mp_factors", description=__doc__, formatter_class=Formatter)
    parser.add_argument("--batches", type=several(count), default="64,128,256,512,1024,2048")
    parser.add_argument(
        "--exchanges", nargs="+", type=exchange_name, default=DEDUP, metavar="EXCHANGE"
    )
    args, rest = parser.parse_known_args()
    options = arguments.parse([*rest, "--parallel", "hybrid", "--batch-size", "1"])
    launch(work, options.ranks, options, args)


if __name__ == "__main__":
    raise SystemExit(main())
