"""Lookups a second in rows that appear in training, beside torch's nn.Embedding, in one run.

    python bench/des_lookups.py --ids 1000000 --dims 16,64

A table of N rows is filled, in batches of 100,000 ids; then batches of ids are looked up, uniformly
drawn from it, in both. Rounds alternate, and medians are compared. Prints a table:

    nn.Embedding  million lookups a second
    dynamic       the same of ids that have a row, hash table and row together
    ratio         of the medians
    new ids       million rows a second that appear, in batches of ids that are all new
    slowest       of these batches over the median one: there is no rehash that one waits for

Nothing is sent: one rank. `--threads` of torch, default 1.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from dct_dlrm.argument_types import count, several
from dct_dlrm.command_line import Formatter, Parser, exit_status
from dct_embeddings import DynamicFeatureRows

BATCH, ROUNDS = 100_000, 31


def measure(ids: int, dim: int) -> str:
    """A line of the table."""
    generator = torch.Generator().manual_seed(0)
    every = torch.randint(2**62, (ids,), generator=generator).unique()
    every = every[torch.randperm(len(every), generator=generator)]
    rows, plain = DynamicFeatureRows(dim, len(every)), nn.Embedding(len(every), dim)
    appearing = [_seconds(lambda b=batch: rows.places(b)) for batch in every.split(BATCH)]
    index = torch.randint(len(every), (BATCH,), generator=generator)
    sought = every[index]
    dynamic, static = [], []
    with torch.no_grad():
        for _ in range(ROUNDS):
            dynamic.append(
                _seconds(lambda: nn.functional.embedding(rows.places(sought), rows.weight))
            )
            static.append(_seconds(lambda: plain(index)))
    speeds = [BATCH / median(times) / 1e6 for times in (static, dynamic, appearing)]
    ratio, slowest = speeds[1] / speeds[0], max(appearing) / median(appearing)
    return (
        f"| {len(every):,} | {dim} | {speeds[0]:.1f} | {speeds[1]:.1f} | {ratio:.2f} | "
        f"{speeds[2]:.1f} | {slowest:.1f}x |"
    )


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    return exit_status("des_lookups.py", _main)


def _main() -> None:
    parser = Parser(prog="des_lookups.py", description=__doc__, formatter_class=Formatter)
    parser.add_argument("--ids", type=several(count), default="100000,1000000")
    parser.add_argument("--dims", type=several(count), default="16,64")
    parser.add_argument("--threads", type=count, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    headings = ["rows", "d", "nn.Embedding", "dynamic", "ratio", "new ids", "slowest"]
    print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
    for ids in args.ids:
        for dim in args.dims:
            print(measure(ids, dim), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
