"""Rows of features that ranks share: the owner of each row, and its index in the weight."""

import math
from abc import ABC, abstractmethod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_kernels import checks
from dct_parallel.groups import known_group, require_group, sharing_errors

from ..groups import GroupOfModule, require_same_settings
from ..loading import CheckedModule

_OP = "FeatureRows"
MOST_ROWS = 2**31 - 1  # so that an id times the multiplier is below 2**62
_GOLDEN = (5**0.5 - 1) / 2
_Rank = TypeVar("_Rank", int, Tensor)


class SharedRows(CheckedModule, ABC):
    """Rows of features that the ranks of a group share. Each rank holds its rows as a parameter.

    A copy (copy.deepcopy, AveragedModel) has its own rows and shares the group.

    Args:
        op: the name of the class, for error messages.
        group: the ranks that share the rows; default: all.

    Attributes:
        weight: parameter [rows, d] with a sparse gradient.
        last_id: the largest valid id.
        no_row: the index in `weight` of the row for unknown features, without gradient, or None.
        capacity: maximum number of rows on this rank, or None if the number is fixed.
    """

    weight: nn.Parameter
    last_id = 2**63 - 1
    no_row: int | None = None
    capacity: int | None = None

    def __init__(self, op: str, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        with sharing_errors(op, known_group(group)):
            self._group = GroupOfModule(op, require_group(op, group))

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the rows."""
        return self._group.get()

    @property
    def width(self) -> int:
        """The width d of a row."""
        return self.weight.shape[1]

    @abstractmethod
    def ids(self) -> Tensor:
        """Return the features of this rank, int64, in the order of their rows."""

    def require_ids(self, op: str, ids: Tensor) -> None:
        """Raise an error with the first invalid id, if there is one. The host waits."""
        outside = ((ids < 0) | (ids.long() > self.last_id)).nonzero()
        if len(outside):
            index = int(outside[0])
            rule = f"in [0, {self.last_id}], got {int(ids[index])}"
            raise ValueError(f"dct::{op}: ids[{index}] must be {rule}")

    @abstractmethod
    def owners(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the owner (int64) of each id's row, and the row's integer name on that owner."""

    @abstractmethod
    def places(self, names: Tensor) -> Tensor:
        """Return the indices in `weight` of this rank's rows with these names (see `owners`)."""

    def __len__(self) -> int:
        """The number of features that have a row on this rank."""
        return len(self.weight)

    def missing(self, names: Tensor) -> int:
        """The number of rows that `places` would add for these names."""
        return 0


class FeatureRows(SharedRows):
    """One row per feature 0 ... rows - 1, distributed over ranks by a hash of the id.

    The hash id * a % rows, with a coprime to rows, is a permutation of the ids. Each rank owns an
    equal range of hashes, so no table of owners is needed. Because a is close to rows times the
    golden ratio, consecutive or evenly spaced ids are spread over the ranks.

    `state_dict` contains this rank's rows and `owner`, which is [rank, ranks, total rows]. Loading
    the state of a different rank, or one that does not match, raises an error before anything is
    loaded. Results are deterministic.

    Args:
        weight: the rows of all features [rows, d], float32 or float64, the same on every rank. Each
            rank copies only its rows, so the tensor may be mapped from a file.
        group: the ranks that share the rows; default: all.

    Attributes:
        weight: parameter [local rows, d] in the order of `ids()`, with a sparse gradient.

    Raises:
        ValueError, TypeError: an argument is out of range.
        ValueError: ranks differ in rows, width or dtype. Every rank raises.
        RuntimeError: an argument is out of range on another rank only.
    """

    identity = "owner"

    def __init__(self, weight: Tensor, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(_OP, group)
        ranks = self.group.size()
        with sharing_errors(_OP, self.group):
            checks.require_tensor(_OP, "weight", weight, (torch.float32, torch.float64), (2,))
            if not ranks <= len(weight) <= MOST_ROWS or weight.shape[1] == 0:
                count = f"rows in [{ranks}, {MOST_ROWS}] (at least one per rank)"
                rule = f"shape [rows, d] with {count} and d >= 1"
                checks.fail(_OP, "weight", rule, tuple(weight.shape), verb="have")
        settings = {"rows": len(weight), "width": weight.shape[1], "dtype": weight.dtype}
        require_same_settings(_OP, settings, self.group, weight.device)
        self._rows, self.last_id = len(weight), len(weight) - 1
        self._multiplier = _multiplier(self._rows)
        self.weight = nn.Parameter(weight.detach()[self.ids().to(weight.device)])
        owner = [self.group.rank(), ranks, self._rows]
        self.register_buffer("owner", torch.tensor(owner, dtype=torch.int64, device=weight.device))

    def ids(self) -> Tensor:
        first, end = (self._first_number(self.group.rank() + i) for i in (0, 1))
        inverse = pow(self._multiplier, -1, self._rows)
        return torch.arange(first, end, dtype=torch.int64, device="cpu") * inverse % self._rows

    def owners(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        number = ids.long() * self._multiplier % self._rows
        owners = number * self.group.size() // self._rows
        return owners, (number - self._first_number(owners)).int()

    def places(self, names: Tensor) -> Tensor:
        return names

    def _first_number(self, rank: _Rank) -> _Rank:
        return (rank * self._rows + self.group.size() - 1) // self.group.size()


def _multiplier(rows: int) -> int:
    multiplier = round(rows * _GOLDEN) or 1
    while math.gcd(multiplier, rows) > 1:
        multiplier += 1
    return multiplier
