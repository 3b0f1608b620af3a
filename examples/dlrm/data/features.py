"""Encodes rows, which consist of a label, 13 integers and 26 categoricals."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from . import hashing

INTS = 13
# Numbers of distinct values, including "missing", of the Criteo Kaggle data set's columns.
CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
TABLES = len(CARDINALITIES)
MISSING = -1  # marks a column without a value
_HASHES = 2**33  # first random stream of `hash_values`; each column has one stream


def table_rows(hash_size: int) -> tuple[int, ...]:
    """The number of rows of each table: one per value of a column, but at most `hash_size`."""
    return tuple(min(cardinality, hash_size) for cardinality in CARDINALITIES)


def encode_values(values: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Map categorical values to table rows: 0 if missing, otherwise 1 + value % (rows - 1).

    Args:
        values: int64 [n, tables], MISSING or >= 0.
        rows: number of rows of each table, at least 2.

    Returns:
        int32 [n, tables].
    """
    count = np.asarray(rows, dtype=np.int64)
    return np.where(values == MISSING, 0, 1 + values % (count - 1)).astype(np.int32)


def hash_values(values: np.ndarray) -> np.ndarray:
    """Hash (column, value) to int64 in [0, 2^63), same shape. Missing values also have a hash."""
    counted = values.astype(np.uint64) + np.uint64(1)  # MISSING becomes 0
    columns = range(values.shape[1])
    hashed = [hashing.bits(0, _HASHES + column, counted[:, column]) for column in columns]
    return (np.stack(hashed, axis=1) >> np.uint64(1)).astype(np.int64)


def encode_ints(ints: np.ndarray) -> np.ndarray:
    """Return log(1 + max(x, 0)) in float32, same shape. Missing integers (-1) become 0."""
    return np.log1p(np.maximum(ints, 0)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Encoded rows in Criteo's layout, 157 bytes each.

    Attributes:
        labels: uint8 [n], 0 or 1.
        ints: float32 [n, 13].
        ids: int32 [n, 26], rows of the embedding tables; or int64, hashes of values.
    """

    labels: Tensor
    ints: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return self.labels.numel()

    def take(self, index: Tensor | slice) -> "Rows":
        """The rows at `index`, in the order of `index`."""
        return Rows(self.labels[index], self.ints[index], self.ids[index])

    @staticmethod
    def encode(
        labels: np.ndarray, ints: np.ndarray, values: np.ndarray, rows: Sequence[int] | None
    ) -> "Rows":
        """Encode labels [n], integers [n, 13] and categorical values as in `encode_values`.

        If `rows` is None, ids are hashes of values (`hash_values`).
        """
        return Rows(
            torch.from_numpy(labels.astype(np.uint8)),
            torch.from_numpy(encode_ints(ints)),
            torch.from_numpy(hash_values(values) if rows is None else encode_values(values, rows)),
        )

    @staticmethod
    def concatenate(parts: "Sequence[Rows]") -> "Rows":
        """All rows of `parts`, in order. Temporarily needs twice the memory of `parts`."""
        return Rows(
            torch.cat([part.labels for part in parts]),
            torch.cat([part.ints for part in parts]),
            torch.cat([part.ids for part in parts]),
        )
