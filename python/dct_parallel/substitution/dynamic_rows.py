"""Rows of features that are not known before they are seen."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_kernels import checks

from ..agreement import require_alike
from .feature_rows import SharedRows
from .id_table import NO_PLACE, IdTable, mix

_OP = "DynamicFeatureRows"
MOST_ROWS = 2**31 - 2  # a place is an int32
MERGED = -1  # for the rank of a state of all ranks
_PER_ROW = "per_row."


class DynamicFeatureRows(SharedRows):
    """A row for each feature that training has met, shared out to ranks by a hash of the id.

    In training mode a feature gets its row when it is first seen: numbers uniform within `bound`,
    by a hash of id and column, so that world sizes do not differ. In eval mode no rows are made,
    and that of an unknown feature is 0. No row is ever given up.

    Ids are any from 0 to 2^63 - 1, such as hashes: nothing is modulo anything. They cross in 8
    bytes. A rank finds rows by a hash table that grows with what is in it, a bucket at a time.

    `state_dict` has the rows there are, and is this rank's; `load_state_dict` takes that, or what
    `merge_feature_rows` made of the states of any number of ranks. Deterministic.

    Args:
        width: d, numbers in a row.
        capacity: rows that this rank can have. Memory is reserved for them, and on the CPU taken
            only as they come: address space is what the rest costs.
        bound: of initial numbers, from 0 up.
        seed: of initial numbers.
        dtype: float32 or float64.
        device: of the rows.
        group: the ranks that share them, default all.

    Attributes:
        weight: parameter [1 + capacity, d]. Row 0 is 0, for unknown features; then come those of
            `ids()`; what is behind has no meaning.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
        ValueError: ranks differ in width, dtype, bound or seed; on all of them. In forward: some
            rank would have more features than its `capacity`; on all of them, and none is added.
    """

    no_row = NO_PLACE

    def __init__(
        self,
        width: int,
        capacity: int,
        bound: float = 0.01,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(_OP, group)
        told = {"width": width, "dtype": dtype, "bound": bound, "seed": seed}
        require_alike(_OP, told, self.group, torch.device(device))
        checks.require_int(_OP, "width", width, 1, 2**31 - 1)
        checks.require_int(_OP, "capacity", capacity, 1, MOST_ROWS)
        checks.require_int(_OP, "seed", seed, 0, 2**31 - 1)
        checks.require_dtype(_OP, "dtype", dtype, (torch.float32, torch.float64))
        if not 0 <= bound < float("inf"):  # false of a NaN as well
            checks.fail(_OP, "bound", "finite, from 0 up", bound)
        self.capacity, self._bound, self._seed = capacity, bound, seed
        self.weight = nn.Parameter(torch.empty(1 + capacity, width, dtype=dtype, device=device))
        self.weight.detach()[NO_PLACE] = 0
        self._table = IdTable(capacity, self.weight.device)
        self._per_row: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._table)

    def ids(self) -> Tensor:
        return self._table.ids

    def require_ids(self, op: str, ids: Tensor) -> None:
        if (ids < 0).any():
            worst = int((ids < 0).nonzero()[0])
            checks.fail(op, f"ids[{worst}]", "from 0 up", int(ids[worst]))

    def owners(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = ids.long()
        return (mix(ids) >> 32) % self.group.size(), ids  # tables use the low bits

    def places(self, names: Tensor) -> Tensor:
        places = self._table.find(names)
        if self.training:
            unknown = (places == NO_PLACE).nonzero().squeeze(1)
            if len(unknown):
                sought = names[unknown]
                self._add(sought.unique())
                places[unknown] = self._table.find(sought)
        return places

    def missing(self, names: Tensor) -> int:
        return len(names[self._table.find(names) == NO_PLACE].unique()) if self.training else 0

    def initial(self, ids: Tensor) -> Tensor:
        """The rows [n, d] that these features begin with."""
        column = torch.arange(1, 1 + self.width, device=ids.device) + (self._seed << 32)
        drawn = mix(mix(ids).unsqueeze(1) ^ mix(column)) >> 39  # 24 bits
        return (drawn.to(self.weight.dtype) * 2.0**-23 - 1) * self._bound

    def attach(self, name: str, tensor: Tensor) -> None:
        """Save and load `tensor` [1 + capacity, ...] with the rows: state of an optimizer, say.

        It begins as zeros. A load writes into this tensor: attach what the optimizer has by then.
        """
        if len(tensor) != len(self.weight):
            checks.fail(_OP, "tensor", f"of {len(self.weight)} rows like weight", len(tensor))
        self._per_row[name] = tensor

    @torch.no_grad()
    def _add(self, ids: Tensor) -> None:
        first, end = 1 + len(self), 1 + len(self) + len(ids)
        if end - 1 > self.capacity:
            checks.fail(_OP, "capacity", f"at least {end - 1}, the features seen", self.capacity)
        self._table.add(ids)
        self.weight[first:end] = self.initial(ids)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        used = slice(1, 1 + len(self))
        state = {
            "owner": torch.tensor([self.group.rank(), self.group.size()]),
            "ids": self.ids().clone(),
            "weight": self.weight.detach()[used].clone(),  # or all of the storage would be saved
        }
        for name, tensor in self._per_row.items():
            state[_PER_ROW + name] = tensor.detach()[used].clone()
        destination.update({prefix + name: tensor for name, tensor in state.items()})

    @torch.no_grad()
    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        per_row = {_PER_ROW + name: tensor for name, tensor in self._per_row.items()}
        names = ["owner", "ids", "weight", *per_row]
        missing = [prefix + name for name in names if prefix + name not in state_dict]
        missing_keys += missing
        known = {prefix + name for name in names}
        unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in known]
        if missing:
            return
        state = {name: state_dict[prefix + name].to(self.weight.device) for name in names}
        try:
            own = self._own_of(state)
        except ValueError as error:
            error_msgs.append(str(error))
            return
        before = len(self)
        self._table = IdTable(self.capacity, self.weight.device)
        self._table.add(state["ids"][own])
        for tensor in self._per_row.values():
            tensor[1 + len(self) : 1 + before] = 0  # as for features that nobody has met
        for name, tensor in {"weight": self.weight, **per_row}.items():
            tensor[1 : 1 + len(self)] = state[name][own]

    def _own_of(self, state: Mapping[str, Tensor]) -> Tensor:
        """Which rows of a state are this rank's, once it is known to be fit for it."""
        rank, ranks = state["owner"].tolist()
        here = (self.group.rank(), self.group.size())
        if rank != MERGED and (rank, ranks) != here:
            rule = f"of rank {here[0]} of {here[1]}, or of all by merge_feature_rows"
            checks.fail(_OP, "state", rule, f"of rank {rank} of {ranks}")
        ids, shape = state["ids"], (len(state["ids"]), self.width)
        if state["weight"].shape != shape:
            checks.fail(_OP, "state", f"of weight {shape}", tuple(state["weight"].shape))
        self.require_ids(_OP, ids)
        if len(ids.unique()) != len(ids):
            checks.fail(_OP, "state", "of different ids", "some of them twice")
        own = (self.owners(ids)[0] == here[0]).nonzero().squeeze(1)
        if len(own) > self.capacity:
            rule = f"at least {len(own)} as of the state"
            checks.fail(_OP, "capacity", rule, self.capacity)
        return own


def merge_feature_rows(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The states of all ranks as one, which ranks of any number can load.

    Args:
        states: `DynamicFeatureRows.state_dict()` of every rank, in any order.

    Raises:
        ValueError: they are not those of all ranks of one run, each once.
    """
    op = "merge_feature_rows"
    owners = sorted(tuple(state["owner"].tolist()) for state in states)
    ranks = owners[0][1] if owners else 0
    if not owners or owners != [(rank, ranks) for rank in range(ranks)]:
        got = ", ".join(f"{rank} of {of}" for rank, of in owners) or "none"
        checks.fail(op, "states", "of every rank once", got)
    if any(state.keys() != states[0].keys() for state in states):
        got = ", ".join(sorted({name for state in states for name in state}))
        checks.fail(op, "states", "of the same names", got)
    merged = {name: torch.cat([state[name] for state in states]) for name in states[0]}
    return merged | {"owner": torch.tensor([MERGED, ranks])}
