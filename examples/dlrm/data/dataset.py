"""The rows that one rank trains and is tested on."""

import argparse
import dataclasses

import numpy as np
import torch
import torch.distributed as dist

from ..errors import UsageError
from ..modes import START_STEP
from ..ranks import from_all_ranks
from . import criteo, hashing, movielens
from .features import Rows, table_rows
from .lines import ReadReport
from .synthetic import Generator
from .zipf import Zipf

GENERATOR_SEED = 0  # one data set for all runs, so that their Bayes score is one number
ROWS_PER_BLOCK = 65536
_SPLIT_STREAM = 2**32  # none of the generator's


@dataclasses.dataclass(frozen=True)
class Dataset:
    """One rank's share of the rows: rank r holds rows r, r + P, r + 2 P, ...

    Attributes:
        train, validation, test: encoded rows, in no two of them the same.
        probability: float64 [len(test)], the true one of label 1; None for data from a file.
        description: of all ranks' rows, for the summary.
        tables: rows of each embedding table; None where ids are names of values.
        warning: what was left out of a file; None if nothing.
    """

    train: Rows
    validation: Rows
    test: Rows
    probability: np.ndarray | None
    description: dict[str, object]
    tables: tuple[int, ...] | None
    warning: str | None = None


def split(
    numbers: np.ndarray, test_fraction: float, validation_fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are test rows and which are validation rows, by a hash of the row number.

    The choice needs no row count, so a file is read once; it is the same in every run and world
    size, and the test rows are the same whatever the validation fraction. It is not a split by
    time: neighbours of a test row are in the training set.
    """
    place = hashing.uniform(0, _SPLIT_STREAM, numbers)
    test = place < test_fraction
    return test, ~test & (place < test_fraction + validation_fraction)


def tables_of(options: argparse.Namespace) -> tuple[int, ...]:
    """Rows of each embedding table, of all data but MovieLens's."""
    if options.zipf is not None:
        return (options.zipf.rows,) * options.zipf.tables
    return table_rows(options.hash_size)


def load(options: argparse.Namespace) -> Dataset:
    """This rank's rows, from `options.data` or, without one, from the generator. Collective.

    Raises:
        UsageError: on every rank, if the rows cannot be used.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hash_size = None if options.dynamic_rows else options.hash_size
    tables = None if options.dynamic_rows else tables_of(options)
    probability = None
    if options.data is not None:
        if options.data_format == "criteo":
            encoded, numbers, report = criteo.read(options.data, tables, rank, world_size)
        else:
            encoded, numbers, tables, report = movielens.read(
                options.data, hash_size, rank, world_size
            )
        report = ReadReport.merge(from_all_ranks(report))
        source = {"file": str(options.data), "malformed": report.malformed}
        warning = f"left out: {report.describe()}" if report.malformed else None
        if not report.rows:
            whose = {"criteo": "Criteo's", "movielens": "MovieLens's"}[options.data_format]
            rule = f"must have a row in {whose} layout"
            raise UsageError(f"{options.data} {rule}, got {report.describe()}")
        if report.malformed > options.max_malformed * report.lines:
            raise UsageError(
                f"{options.data} must have at most {options.max_malformed:.4g} of its lines "
                f"malformed (--max-malformed), got {report.describe()}"
            )
    else:
        numbers = np.arange(rank, options.rows, world_size)
        encoded, probability = _generate(numbers, tables, options.multi_hot, options.zipf)
        source, warning = {"generator_seed": GENERATOR_SEED}, None
    test, validation = split(numbers, options.test_fraction, options.validation_fraction)
    parts = [_rows_where(encoded, mask) for mask in (~(test | validation), validation, test)]
    try:
        description = source | _check(*parts, options)
    except UsageError as error:
        # What was left out may be why.
        raise UsageError(f"{warning}\n{error}" if warning else str(error)) from None
    if probability is not None:
        probability = probability[test]
    return Dataset(*parts, probability, description, tables, warning)


def _generate(
    numbers: np.ndarray, rows: tuple[int, ...] | None, most: int, zipf: Zipf | None
) -> tuple[Rows, np.ndarray]:
    generator = Generator(GENERATOR_SEED, most, zipf)
    parts, probabilities = [], []
    for start in range(0, max(1, len(numbers)), ROWS_PER_BLOCK):  # a block at least, of no rows
        block = generator.rows(numbers[start : start + ROWS_PER_BLOCK])
        parts.append(Rows.encode(block.labels, block.ints, block.values, rows))
        probabilities.append(block.probability)
    return Rows.concatenate(parts), np.concatenate(probabilities)


def _rows_where(rows: Rows, mask: np.ndarray) -> Rows:
    return rows.take(torch.from_numpy(np.flatnonzero(mask)))


def _check(
    train: Rows, validation: Rows, test: Rows, options: argparse.Namespace
) -> dict[str, object]:
    """Counts over all ranks, which all agree on whether they will do."""
    train_counts = from_all_ranks(len(train))
    if min(train_counts) < options.batch_size:
        raise UsageError(
            f"--batch-size must be at most the training rows of a rank, {min(train_counts)}, "
            f"got {options.batch_size}"
        )
    held_out = _held_out("test", test)
    if options.validation_fraction:
        held_out |= _held_out("validation", validation)
    steps_per_epoch = min(train_counts) // options.batch_size
    if options.epochs * steps_per_epoch <= START_STEP:
        raise UsageError(
            f"a run must take more than {START_STEP} steps, got {options.epochs * steps_per_epoch}:"
            " raise --epochs or lower --batch-size"
        )
    return {"train_rows": sum(train_counts), **held_out, "steps_per_epoch": steps_per_epoch}


def _held_out(name: str, rows: Rows) -> dict[str, object]:
    """Counts of rows that are not trained on; without both labels they have no AUC."""
    shares = from_all_ranks((len(rows), int(rows.labels.sum())))
    count, clicks = (sum(of_ranks) for of_ranks in zip(*shares, strict=True))
    if not 0 < clicks < count:
        raise UsageError(
            f"the {name} rows must have labels 0 and 1, got {clicks} ones in {count} rows: raise "
            f"--{name}-fraction"
        )
    return {f"{name}_rows": count, f"{name}_click_rate": clicks / count}
