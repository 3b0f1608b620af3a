"""What embedding tables take of a rank's memory: counted in its tensors, and by formula.

    python bench/table_memory.py --ranks 4 --rows 20000 --batch-size 32 --sync-every 10

Full model parallelism over all ranks (mp), and --replicas replicas with each kind of sync: weights
and accumulators of row-wise AdaGrad, and what a sync keeps between two of them. That is a byte for
each row, 4 for each row that was changed since the last sync, what such rows held then (not with
float32 rows), and what waits (dct). The most after any of --periods periods, just before the sync;
temporary tensors of a step or a sync are not counted. Rows are generated.

Other options are those of dct-train.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from two_dimensional import options_of

from dct_dlrm import arguments
from dct_dlrm.argument_types import count
from dct_dlrm.command_line import Formatter, Parser, exit_status
from dct_dlrm.data import dataset
from dct_dlrm.launch import launch
from dct_dlrm.models.dlrm import DLRM
from dct_dlrm.models.row_exchange import EXCHANGES
from dct_dlrm.models.sharded import ShardedDLRM
from dct_dlrm.optimizers import make_optimizers
from dct_dlrm.parallel import make_sync, plan_tables
from dct_dlrm.ranks import from_all_ranks
from dct_embeddings import ShardedEmbeddingBags
from dct_embeddings.two_dimensional.averages import Average

KINDS = ("mp", "float32", "bfloat16", "dct")


def measure(kind: str, options: argparse.Namespace, periods: int) -> tuple[int, int]:
    """(bytes counted, bytes by formula) of this rank, where most were counted."""
    variant = kind if kind == "mp" else f"scaled/{options.sync_every}/{kind}"
    own = options_of(variant, options.lr, options)
    torch.manual_seed(0)
    data = dataset.load(own)
    whole = DLRM(data.tables, own.embedding_dim, own.bottom, own.top)
    exchange = EXCHANGES["dense"](own)
    model = ShardedDLRM(whole, plan_tables(own), exchange, replicas=own.replicas)
    optimizer = make_optimizers(model, own)["tables"]
    sync = None if kind == "mp" else make_sync(model, optimizer, "dct", own)
    average = sync and sync._average
    weight, found = model.tables.weight, []
    for step in range(periods * options.sync_every):
        rows = data.train.take(torch.arange(own.batch_size) + step * own.batch_size)
        optimizer.zero_grad()
        nn.functional.softplus(model(rows.ints, rows.ids)).mean().backward()
        optimizer.step()
        if (step + 1) % options.sync_every == 0:
            counted = tensor_bytes(weight.detach(), optimizer.state, average)
            found.append((counted, formula(kind, model.tables, average)))
        if sync is not None:
            sync.step()
    model.close()
    return max(found)


def formula(kind: str, bags: ShardedEmbeddingBags, average: Average | None) -> int:
    """Of rows that this rank owns, that it has changed, and of which something waits."""
    own, width = bags.weight.shape
    row = 4 * (width + 1)
    if average is None:
        return row * own
    touched = sum(len(rows) for rows in average.touched._rows)
    kept = 0 if kind == "float32" else 4 * width * touched
    kept += row * len(average.rows) if kind == "dct" else 0
    return row * own + own + 4 * touched + kept


def tensor_bytes(*roots: object) -> int:
    """Of all tensors that these hold, each storage once."""
    storages = {}
    for tensor in _tensors(list(roots)):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(held: object) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, dict):
        yield from _tensors(list(held.values()))
    elif isinstance(held, (list, tuple)):
        for part in held:
            yield from _tensors(part)
    elif type(held).__module__.startswith("dct_embeddings"):
        yield from _tensors(vars(held))


def work(options: argparse.Namespace, periods: int) -> None:
    """All kinds, on one rank; the first prints the rank that has most."""
    if dist.get_rank() == 0:
        print("| | bytes counted | by formula | of mp |\n|---|---|---|---|")
    of_full = None
    for kind in KINDS:
        counted, expected = max(from_all_ranks(measure(kind, options, periods)))
        of_full = of_full or counted
        if dist.get_rank() == 0:
            print(line(kind, counted, expected, of_full), flush=True)


def line(kind: str, counted: int, expected: int, of_full: int) -> str:
    return f"| {kind} | {counted:,} | {expected:,} | {counted / of_full:.2f} |"


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, int]:
    parser = Parser(prog="table_memory.py", description=__doc__, formatter_class=Formatter)
    parser.add_argument("--periods", type=count, default=4, help="between syncs")
    args, rest = parser.parse_known_args(argv)
    return arguments.parse([*rest, "--parallel", "2d"]), args.periods


def main() -> int:
    return exit_status("table_memory.py", _main)


def _main() -> None:
    options, periods = parse()
    launch(work, options.ranks, options, periods)


if __name__ == "__main__":
    raise SystemExit(main())
