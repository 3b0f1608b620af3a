"""2D DLRM: what averaging replicas of the tables does to quality, and what it sends.

    python -m experiments.two_dimensional --ranks 4 --rows 200000 --rates 0.01,0.1 --out runs/2d
    python -m experiments.two_dimensional --variants mp c1/10 scaled/10 scaled/10/dct --seeds 2

A variant is mp, full model parallelism over all ranks, or OPTIMIZER/PERIOD or
OPTIMIZER/PERIOD/FORMAT with 2 replicas (--replicas): row-wise AdaGrad as it is (c1), with squares
divided by the replicas (scaled), and divided by the accumulators of the last sync, too (delayed);
steps between syncs; what crosses then: float32 rows, bfloat16 deltas, or the largest entries of
deltas (dct, --sync-density). Ids are generated, by a power law. Nothing else is compressed. All
runs of a seed start from the same weights and see the same batches.

1. Every variant is trained with every rate of the tables, from seed 0. Its best rate is that of the
   lowest log loss on the validation rows. A scale c is the rate / sqrt(c), so each variant has its
   own. The test rows are not read.
2. At its best rate it is trained from seeds 1, 2, ... and scored on the test rows, once.

Each finished run is a file in --out. A run whose file is there is not repeated, so a command that
was interrupted goes on where it was, and further variants, rates and seeds may be added. In the end
it prints a report on all runs in --out, and writes it there (report.md).

Other options are those of train_dlrm.py; without --validation-fraction it is 0.1.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dlrm.command_line import Formatter, Parser, exit_status
from dlrm.data import dataset
from dlrm.models.row_exchange import EXCHANGES
from dlrm.modes import MODES
from pages import trained

from .mp_formats import SETTINGS
from .run_files import Run, add_rates, parse, rated, settings_of, train_by_rates, write_report

FULL = "mp"  # one group of all ranks
OPTIMIZERS = {
    "c1": ("rowwise_adagrad", False),
    "scaled": ("momentum_scaled_rowwise_adagrad", False),
    "delayed": ("momentum_scaled_rowwise_adagrad", True),
}
PERIODS = (1, 10, 100)
FORMATS = ("float32", "bfloat16", "dct")
NAMES = [FULL, *(f"{name}/{period}" for name in OPTIMIZERS for period in PERIODS)]
NAMES += [f"{name}/10/{format}" for name in ("scaled", "delayed") for format in FORMATS[1:]]


class Variant(NamedTuple):
    """What a variant's name says."""

    optimizer: str
    period: int
    format: str

    @staticmethod
    def parse(name: str) -> "Variant | None":
        """None for full model parallelism."""
        if name == FULL:
            return None
        optimizer, _, rest = name.partition("/")
        period, _, format = rest.partition("/")
        known = optimizer in OPTIMIZERS and format in (*FORMATS, "")
        if not (known and period.isdecimal() and int(period) > 0):
            rule = f"{FULL}, or {'|'.join(OPTIMIZERS)}/PERIOD, or that/{'|'.join(FORMATS)}"
            raise argparse.ArgumentTypeError(f"must be {rule}, got {name!r}")
        return Variant(optimizer, int(period), format or FORMATS[0])


def variant_name(text: str) -> str:
    """An argparse type: the name of a variant, checked; as a file may have it."""
    Variant.parse(text)
    return text


def options_of(name: str, rate: float, options: argparse.Namespace) -> argparse.Namespace:
    """train_dlrm.py's, for a run of this variant."""
    variant, own = Variant.parse(name), argparse.Namespace(**vars(options))
    own.embedding_lr = rate
    if variant is None:
        own.replicas, own.embedding_optimizer = 1, "rowwise_adagrad"
        return own
    own.embedding_optimizer, own.delayed_accumulator = OPTIMIZERS[variant.optimizer]
    own.sync_every = variant.period
    own.sync_format = None if variant.format == "dct" else variant.format
    return own


def job(
    run: Run, data: dataset.Dataset, options: argparse.Namespace, on_step: Callable
) -> tuple[dict, str]:
    """Of `run_files`: one run, as "dct", whose syncs are compressed, but nothing else."""
    MODES["dct"], EXCHANGES["dct"] = MODES["dense"], EXCHANGES["dense"]
    return rated("dct", run, data, options_of(run.exchange, run.rate, options), on_step)


def main() -> int:
    return exit_status("two_dimensional", _main)


def _main() -> None:
    parser = Parser(prog="two_dimensional", description=__doc__, formatter_class=Formatter)
    parser.add_argument(
        "--variants", nargs="+", type=variant_name, default=NAMES, metavar="VARIANT"
    )
    add_rates(parser, [0.01, 0.03, 0.1], seeds=3)
    parser.add_argument("--out", type=Path, default=Path("runs/two_dimensional"), metavar="DIR")
    options, args = parse(parser, "2d")
    settings = settings_of(options, (*SETTINGS, "replicas", "sync_density"))
    records = train_by_rates(options, args, args.variants, settings, job)
    write_report(options.out, trained.report(records))


if __name__ == "__main__":
    raise SystemExit(main())
