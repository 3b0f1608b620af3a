"""The training and test rows of one rank."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ..errors import UsageError
from ..ranks import from_all_ranks
from . import criteo, hashing
from .features import Rows, table_rows
from .synthetic import Generator

GENERATOR_SEED = 0  # all runs use the same rows and share one Bayes score
MALFORMED_SHARE = 0.01  # maximum fraction of malformed lines in a file
ROWS_PER_BLOCK = 65536
_SPLIT_STREAM = 2**32  # a random stream that the generator does not use


@dataclasses.dataclass(frozen=True)
class Dataset:
    """One rank's share of the rows: rank r of P holds rows r, r + P, r + 2 P, ...

    Attributes:
        train, test: disjoint sets of encoded rows.
        probability: float64 [len(test)], the true probability of label 1; None for a file.
        description: counts over all ranks, for reports.
        tables: number of rows of each embedding table; None if ids are hashes of values.
        warning: describes skipped lines of a file; None if no line was skipped.
    """

    train: Rows
    test: Rows
    probability: np.ndarray | None
    description: dict[str, object]
    tables: tuple[int, ...] | None
    warning: str | None = None


def split(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return masks of test rows (20 %) and validation rows (10 %), from a hash of the row number.

    The masks do not depend on the number of ranks. This is not a split by time: rows next to a test
    row can be in the training set.
    """
    place = hashing.uniform(0, _SPLIT_STREAM, numbers)
    return place < 0.2, (place >= 0.2) & (place < 0.3)


def load(data: Path | None, rows: int, hash_size: int | None, batch_size: int) -> Dataset:
    """Load this rank's rows. Collective.

    Args:
        data: a file in Criteo's layout. If None, `rows` rows are generated.
        rows: number of rows to generate, including test rows.
        hash_size: maximum rows per embedding table. If None, ids are hashes of values.
        batch_size: rows per rank and step.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tables = None if hash_size is None else table_rows(hash_size)
    probability = warning = None
    if data is not None:
        encoded, numbers, report = criteo.read(data, tables, rank, world_size)
        report = criteo.ReadReport.merge(from_all_ranks(report))
        warning = _require_rows(data, report)
        source = {"file": str(data), "malformed": report.malformed}
    else:
        numbers = np.arange(rank, rows, world_size)
        encoded, probability = _generate(numbers, tables)
        source = {"generator_seed": GENERATOR_SEED}
    test, _ = split(numbers)
    parts = [encoded.take(torch.from_numpy(np.flatnonzero(mask))) for mask in (~test, test)]
    return Dataset(
        *parts,
        probability=None if probability is None else probability[test],
        description=source | _counts(*parts, batch_size),
        tables=tables,
        warning=warning,
    )


def batches(data: Dataset, batch_size: int, seed: int) -> Iterator[Rows]:
    """Yield batches of this rank's training rows, shuffled. Drop an incomplete batch.

    The number of batches is the same on all ranks.
    """
    generator = torch.Generator().manual_seed(seed * dist.get_world_size() + dist.get_rank())
    order = torch.randperm(len(data.train), generator=generator)
    for index in order.split(batch_size)[: data.description["steps"]]:
        yield data.train.take(index)


def _require_rows(path: Path, report: criteo.ReadReport) -> str | None:
    """Return a warning about malformed lines, or None. If there are too many, raise UsageError."""
    if not report.rows:
        raise UsageError(f"{path} must have a row in Criteo's layout, got {report.describe()}")
    if report.malformed > MALFORMED_SHARE * (report.rows + report.malformed):
        raise UsageError(
            f"{path} must have at most {MALFORMED_SHARE:.0%} malformed lines, got "
            f"{report.describe()}"
        )
    return f"skipped: {report.describe()}" if report.malformed else None


def _generate(numbers: np.ndarray, tables: tuple[int, ...] | None) -> tuple[Rows, np.ndarray]:
    generator = Generator(GENERATOR_SEED)
    parts, probabilities = [], []
    for start in range(0, max(1, len(numbers)), ROWS_PER_BLOCK):  # at least one block
        block = generator.rows(numbers[start : start + ROWS_PER_BLOCK])
        parts.append(Rows.encode(block.labels, block.ints, block.values, tables))
        probabilities.append(block.probability)
    return Rows.concatenate(parts), np.concatenate(probabilities)


def _counts(train: Rows, test: Rows, batch_size: int) -> dict[str, object]:
    """Return counts over all ranks. Raise UsageError on all ranks if there are too few rows."""
    shares = from_all_ranks((len(train), len(test), int(test.labels.sum())))
    rows, test_rows, clicks = (sum(share) for share in zip(*shares, strict=True))
    fewest = min(share[0] for share in shares)
    if fewest < batch_size:
        raise UsageError(
            f"--batch-size must be at most the training rows per rank, {fewest}, got {batch_size}"
        )
    if not 0 < clicks < test_rows:  # AUC needs both labels
        raise UsageError(
            f"the test rows must have labels 0 and 1, got {clicks} ones in {test_rows} rows: use "
            "more rows"
        )
    counts = {"train_rows": rows, "test_rows": test_rows, "steps": fewest // batch_size}
    return counts | {"test_click_rate": clicks / test_rows}
