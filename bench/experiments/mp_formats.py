"""Trains hybrid-parallel DLRM with different number formats for embedding rows.

    python -m bench.experiments.mp_formats --data ROWS.tsv --epochs 5 --batch-size 64
    python -m bench.experiments.mp_formats --exchanges float32 int4,sign+dedup --rates 3,10

An exchange is FORMAT, FORWARD,BACKWARD (two formats), or a percentage such as 7.5%, which is the
fraction of each row's entries that is sent. With +dedup, each distinct row is sent once. The
gradients of the MLPs are averaged in float32. All runs with the same seed use the same initial
weights and batches.

1. Each exchange is trained with each learning rate of the tables from seed 0. The best rate of an
   exchange has the lowest log loss on the validation rows.
2. Each exchange is trained at its best rate from seeds 1, 2, ... and scored on the test rows.

Each finished run is stored as a file in --out and is not repeated.
"""

import argparse
import statistics

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from bench.cli import exit_status
from dct_embeddings import plan_shards
from dct_parallel import RowFormat
from dlrm.data import dataset
from dlrm.models.dlrm import DLRM
from dlrm.models.row_exchange import rows_in
from dlrm.models.sharded import ShardedDLRM
from wire_meter import WireMeter

from . import clicks

FORMATS = ("float32", "int8", "int4,int4", "int4,ternary", "int4,sign", "7.5%")
NAMES = [f"{format}{dedup}" for dedup in ("", "+dedup") for format in FORMATS]


def parse_exchange(name: str) -> tuple[RowFormat, bool]:
    """Return (format, whether each distinct row is sent once).

    Raises:
        argparse.ArgumentTypeError: `name` is not a valid exchange.
    """
    text, plus, word = name.partition("+")
    try:
        if (plus, word) not in (("", ""), ("+", "dedup")):
            raise ValueError("the ending must be +dedup")
        if text.endswith("%"):
            return RowFormat("bfloat16", density=float(text[:-1]) / 100), bool(plus)
        return RowFormat(*text.split(",", 1)), bool(plus)
    except ValueError as error:
        rule = "one or two number formats or a percentage, with or without +dedup"
        raise argparse.ArgumentTypeError(f"must be {rule}, got {name!r}: {error}") from None


def known(name: str) -> str:
    """An argparse type: the name of an exchange."""
    parse_exchange(name)
    return name


def job(
    exchange: str, rate: float, seed: int, data: dataset.Dataset, options: argparse.Namespace
) -> tuple[nn.Module, float, dict[str, float]]:
    """Train with one exchange; see `clicks.Job`. Collective."""
    format, dedup = parse_exchange(exchange)
    torch.manual_seed(seed)
    whole = DLRM(data.tables, options.embedding_dim, options.bottom, options.top)
    model = ShardedDLRM(whole, plan_shards(data.tables, options.ranks), rows_in(format), dedup)
    model.mlps = DistributedDataParallel(model.mlps, gradient_as_bucket_view=True)
    tables = torch.optim.SGD(model.tables.parameters(), rate, fused=True)
    mlps = torch.optim.SGD(model.mlps.parameters(), options.lr, fused=True)
    sent: list[tuple[int, ...]] = []
    with WireMeter(model.ids_group) as ids, WireMeter(model.rows_group) as rows:
        for batch in dataset.batches(data, options.batch_size, seed, options.epochs):
            model.zero_grad()
            logits = model(batch.ints, batch.ids)
            forward = rows.take()
            loss = binary_cross_entropy_with_logits(logits, batch.labels.float())
            loss.backward()
            tables.step()
            mlps.step()
            sent.append((ids.take(), forward, rows.take()))
    means = map(statistics.mean, zip(*sent, strict=True))
    names = ("ids", "rows forward", "rows backward")
    return model, loss.item(), dict(zip(names, means, strict=True))


def main() -> None:
    parser = clicks.parser("mp_formats", __doc__, NAMES, known)
    clicks.train_by_rates(parser.parse_args(), job)


if __name__ == "__main__":
    raise SystemExit(exit_status("mp_formats", main))
