"""What a row is: a label, integers and categoricals, and how they are encoded.

Criteo's has 13 integers and 26 categoricals.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from . import hashing

INTS = 13
# Distinct values of each categorical column of the Criteo Kaggle data set, missing included.
CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
TABLES = len(CARDINALITIES)
MISSING_ID = 0
MISSING, EMPTY = -1, -2  # no value: of a column, which has a row for that; of a place in a bag
_NAMES = 2**33  # streams of hashes that nothing else has, one a column


def table_rows(hash_size: int) -> tuple[int, ...]:
    """Rows of each embedding table: as many as the column has values, at most `hash_size` >= 2."""
    return tuple(min(cardinality, hash_size) for cardinality in CARDINALITIES)


def encode_values(values: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Table rows of categorical values: row 0 is for missing ones, 1 + value % (rows - 1) else.

    Args:
        values: int64 [n, tables], or bags of them [n, tables, most]; MISSING or EMPTY, or from 0.
        rows: of each table, at least 2.

    Returns:
        int32 like values, -1 where EMPTY.
    """
    count = np.asarray(rows, dtype=np.int64).reshape(-1, *[1] * (values.ndim - 2))
    ids = np.where(values == MISSING, MISSING_ID, 1 + values % (count - 1))
    return np.where(values == EMPTY, -1, ids).astype(np.int32)


def name_values(values: np.ndarray) -> np.ndarray:
    """Names of categorical values: hashes of column and value, from 0 to 2^63 - 1.

    Args:
        values: as of `encode_values`. A column's missing value has a name, too.

    Returns:
        int64 like values, -1 where EMPTY.
    """
    counted = values.astype(np.uint64) + np.uint64(1)  # MISSING to 0
    columns = range(values.shape[1])
    hashed = [hashing.bits(0, _NAMES + column, counted[:, column]) for column in columns]
    names = (np.stack(hashed, axis=1) >> np.uint64(1)).astype(np.int64)
    return np.where(values == EMPTY, -1, names)


def encode_ints(ints: np.ndarray) -> np.ndarray:
    """log(1 + max(x, 0)) as float32, same shape: missing (-1) and negative integers give 0."""
    return np.log1p(np.maximum(ints, 0)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Encoded rows: in Criteo's layout, 157 bytes each.

    Attributes:
        labels: uint8 [n], 0 or 1.
        ints: float32 [n, 13].
        ids: int32 [n, 26], rows of the embedding tables, or int64, names of values; or bags of them
            [n, tables, most], -1 where a bag has fewer.
    """

    labels: Tensor
    ints: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return self.labels.numel()

    def take(self, index: Tensor | slice) -> "Rows":
        """The rows at `index`, in that order."""
        return Rows(self.labels[index], self.ints[index], self.ids[index])

    @staticmethod
    def encode(
        labels: np.ndarray, ints: np.ndarray, values: np.ndarray, rows: Sequence[int] | None
    ) -> "Rows":
        """Rows from labels [n], integers [n, 13] and categorical values as of `encode_values`.

        Without the tables' rows their ids are names, as of `name_values`.
        """
        return Rows(
            torch.from_numpy(labels.astype(np.uint8)),
            torch.from_numpy(encode_ints(ints)),
            torch.from_numpy(name_values(values) if rows is None else encode_values(values, rows)),
        )

    @staticmethod
    def concatenate(parts: "Sequence[Rows]") -> "Rows":
        """All rows of `parts`, in order; needs twice their memory for a moment."""
        return Rows(
            torch.cat([part.labels for part in parts]),
            torch.cat([part.ints for part in parts]),
            torch.cat([part.ids for part in parts]),
        )
