"""Hybrid DLRM over number formats of its rows, with and without distinct rows once.

    python -m experiments.mp_formats --data ROWS.tsv --epochs 5 --batch-size 64 --out runs/kaggle
    python -m experiments.mp_formats --exchanges float32 int4,sign+dedup --rates 3,10 --seeds 2

An exchange is FORMAT, or FORWARD,BACKWARD, or mxfp4 (a baseline: mxfp4.py), or the percentage of
a row's entries that DCT-MP sends, such as 7.5%; with +dedup each distinct row crosses once. Only
rows and their gradients cross so: the MLPs' gradients are averaged in float32. All runs of a seed
start from the same weights and see the same batches.

1. Every exchange is trained with every rate of the tables, from seed 0. Its best rate is that of
   the lowest log loss on the validation rows. The test rows are not read.
2. At its best rate it is trained from seeds 1, 2, ... and scored on the test rows, once.

Each finished run is a file in --out. A run whose file is there is not repeated, so a command that
was interrupted goes on where it was, and further exchanges, rates and seeds may be added. In the
end it prints a report on all runs in --out, and writes it there (report.md).

Other options are those of train_dlrm.py; without --validation-fraction it is 0.1.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from dct_parallel import RowFormat
from dct_parallel.rows.all_to_all import RowExchange
from dlrm.command_line import Formatter, Parser, exit_status
from dlrm.data import dataset
from dlrm.models.row_exchange import EXCHANGES, rows_in
from dlrm.modes import MODES
from pages import experiments, trained

from . import mxfp4
from .run_files import Run, add_rates, parse, rated, settings_of, train_by_rates, write_report

FORMATS = (mxfp4.NAME, "int8", "int4,int4", "int4,ternary", "int4,sign", "7.5%")
NAMES = [f"{format}{dedup}" for dedup in ("", "+dedup") for format in ("float32", *FORMATS)]
# What must be equal in all runs of a folder: everything but what an exchange or a run is.
SETTINGS = ("rows", "test_fraction", "validation_fraction", "epochs", "batch_size", "lr")
SETTINGS += ("hash_size", "zipf", "embedding_dim", "bottom", "top")


class Kind(NamedTuple):
    """What an exchange's name says; without a format it is mxfp4."""

    format: RowFormat | None
    dedup: bool

    @staticmethod
    def parse(name: str) -> "Kind":
        text, plus, word = name.partition("+")
        if (plus, word) not in (("", ""), ("+", "dedup")):
            raise argparse.ArgumentTypeError(f"must end in +dedup or without +, got {name!r}")
        try:
            return Kind(None if text == mxfp4.NAME else _row_format(text), bool(plus))
        except ValueError as error:
            rule = f"one or two number formats, or {mxfp4.NAME}, or a percentage"
            raise argparse.ArgumentTypeError(f"must be {rule}, got {name!r}: {error}") from None

    def exchange(self) -> RowExchange:
        return mxfp4.exchange if self.format is None else rows_in(self.format)

    def row_bytes(self, width: int) -> tuple[int, int]:
        """Of a row, and of its gradient."""
        if self.format is None:
            return mxfp4.row_bytes(width), mxfp4.row_bytes(width)
        codec = self.format.codec(width, torch.float32)
        return codec.message_bytes, codec.gradient_bytes


def _row_format(text: str) -> RowFormat:
    if text.endswith("%"):
        return RowFormat("bfloat16", density=float(text[:-1]) / 100)
    return RowFormat(*text.split(",", 1))


def job(
    run: Run, data: dataset.Dataset, options: argparse.Namespace, on_step: Callable
) -> tuple[dict, str]:
    """Of `run_files`: one run."""
    kind = Kind.parse(run.exchange)
    EXCHANGES[run.exchange] = lambda options: kind.exchange()
    MODES[run.exchange] = MODES["dense"]
    options.dedup, options.embedding_lr = kind.dedup, run.rate
    found, said = rated(run.exchange, run, data, options, on_step)
    if kind.dedup:
        width = options.embedding_dim
        rows = found[f"mp_forward{experiments.BYTES}"] / kind.row_bytes(width)[0]
        found[f"distinct_float32{experiments.BYTES}"] = 8 * width * rows  # both ways
    return found, said


def exchange_name(text: str) -> str:
    """An argparse type: the name of an exchange, checked."""
    Kind.parse(text)
    return text


def main() -> int:
    return exit_status("mp_formats", _main)


def _main() -> None:
    parser = Parser(prog="mp_formats", description=__doc__, formatter_class=Formatter)
    parser.add_argument(
        "--exchanges", nargs="+", type=exchange_name, default=NAMES, metavar="EXCHANGE"
    )
    add_rates(parser, [0.3, 1.0, 3.0, 10.0], seeds=5)
    parser.add_argument("--out", type=Path, default=Path("runs/mp_formats"), metavar="DIR")
    options, args = parse(parser, "hybrid")
    settings = settings_of(options, SETTINGS)
    records = train_by_rates(options, args, args.exchanges, settings, job)
    write_report(options.out, trained.report(records))


if __name__ == "__main__":
    raise SystemExit(main())
