"""Rows of features. A feature gets a row when it is first seen in training."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_kernels import checks
from dct_parallel.groups import sharing_errors

from ..groups import require_same_settings
from ..loading import require_loadable, without_prefix
from .dynamic_state import MERGED, require_state
from .feature_rows import SharedRows
from .id_table import NO_PLACE, IdTable, mix

_OP = "DynamicFeatureRows"
MOST_ROWS = 2**31 - 2  # a place is an int32
_PER_ROW = "per_row."


class DynamicFeatureRows(SharedRows):
    """One row per feature seen in training, distributed over ranks by a hash of the id.

    In training mode, a feature receives a row when it is first seen. Initial values are uniform
    within `bound`, computed from a hash of id and column, so they do not depend on the number of
    ranks. In eval mode the row of an unknown feature is 0. Rows are never evicted. Ids are any
    integers from 0 to 2^63 - 1, such as hashes. An id takes 8 bytes in a message.

    `state_dict` contains the rows of this rank. `load_state_dict` takes this state or, on any
    number of ranks, the result of `merge_feature_rows`. If it raises an error, nothing is loaded. A
    copy (copy.deepcopy, AveragedModel) has the features known at that time, and shares the group.
    Results are deterministic.

    Args:
        width: the width d of a row.
        capacity: maximum number of rows on this rank. The constructor reserves memory for all of
            them, but on the CPU, pages are allocated only when rows are created.
        bound: the bound of initial values, from 0 to the largest number of `dtype`.
        seed: the seed of initial values.
        dtype: float32 or float64.
        device: the device of the rows.
        group: the ranks that share the rows; default: all.

    Attributes:
        weight: parameter [1 + capacity, d], with a sparse gradient. Row 0, for unknown features, is
            0. The rows of `ids()` follow. Later rows are unused.

    Raises:
        ValueError, TypeError: an argument is out of range.
        ValueError: ranks differ in width, dtype, bound or seed. Every rank raises.
        ValueError: in forward, a rank would exceed its `capacity`. No row is added, and every rank
            raises.
        RuntimeError: an argument is out of range on another rank only.
    """

    no_row = NO_PLACE
    capacity: int

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
        with sharing_errors(_OP, self.group):
            device = checks.require_device(_OP, device)
            checks.require_int(_OP, "capacity", capacity, 1, MOST_ROWS)
        settings = {"width": width, "dtype": dtype, "bound": bound, "seed": seed}
        require_same_settings(_OP, settings, self.group, device)
        checks.require_int(_OP, "width", width, 1, 2**31 - 1)
        checks.require_int(_OP, "seed", seed, 0, 2**31 - 1)
        checks.require_dtype(_OP, "dtype", dtype, (torch.float32, torch.float64))
        checks.require_number(_OP, "bound", bound)
        most = torch.finfo(dtype).max
        if not 0 <= bound <= most:  # also raises for NaN
            checks.fail(_OP, "bound", f"in [0, {most:.2g}]", bound)
        self.capacity, self._bound, self._seed = capacity, bound, seed
        self.weight = nn.Parameter(torch.empty(1 + capacity, width, dtype=dtype, device=device))
        self.weight.detach()[NO_PLACE] = 0
        self._table = IdTable(capacity, self.weight.device)
        self._attached: dict[str, tuple[torch.optim.Optimizer, str]] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_attached": {}}  # a copy has a different optimizer

    def __len__(self) -> int:
        return len(self._table)

    def ids(self) -> Tensor:
        return self._table.ids

    def owners(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = ids.long()
        return (mix(ids) >> 32) % self.group.size(), ids  # IdTable uses the low bits

    def places(self, names: Tensor) -> Tensor:
        places = self._table.find(names)
        if self.training:
            unknown = (places == NO_PLACE).nonzero().squeeze(1)
            if len(unknown):
                new = names[unknown]
                self._add(new.unique())
                places[unknown] = self._table.find(new)
        return places

    def missing(self, names: Tensor) -> int:
        return len(names[self._table.find(names) == NO_PLACE].unique()) if self.training else 0

    def initial(self, ids: Tensor) -> Tensor:
        """Return the initial rows [n, d] of the features `ids`, int32 or int64 [n]."""
        checks.require_tensor(_OP, "ids", ids, (torch.int32, torch.int64))
        ids = ids.long()
        column = torch.arange(1, 1 + self.width, dtype=torch.int64, device=ids.device)
        column += self._seed << 32
        drawn = mix(mix(ids).unsqueeze(1) ^ mix(column)) >> 39  # 24 bits
        return (drawn.to(self.weight.dtype) * 2.0**-23 - 1) * self._bound

    def attach(self, name: str, optimizer: torch.optim.Optimizer, key: str) -> None:
        """Save and load a state of an optimizer together with the rows, under the key `name`.

        The state is the tensor `optimizer.state[rows.weight][key]` [1 + capacity, ...] at the time
        of the save or load. A load overwrites it, with zeros for features without a row. If the
        world size changes, load the optimizer before the rows. Copies of the rows have no attached
        state.

        Raises:
            ValueError, TypeError: the optimizer has no such tensor. `state_dict` and
                `load_state_dict` also raise if the tensor is missing later.
        """
        for arg, value in (("name", name), ("key", key)):
            checks.require_type(_OP, arg, value, str, "a string")
        kind = torch.optim.Optimizer
        checks.require_type(_OP, "optimizer", optimizer, kind, "a torch.optim.Optimizer")
        self._state_of(optimizer, key)
        self._attached[name] = optimizer, key

    def _per_row(self) -> dict[str, Tensor]:
        """The saved tensors: the weight and the attached states."""
        # Looked up each time, because an optimizer that loads a state creates new tensors.
        attached = {_PER_ROW + name: self._state_of(*key) for name, key in self._attached.items()}
        return {"weight": self.weight, **attached}

    def _state_of(self, optimizer: torch.optim.Optimizer, key: str) -> Tensor:
        tensor, rows = optimizer.state.get(self.weight, {}).get(key), len(self.weight)
        if not isinstance(tensor, Tensor) or tensor.shape[:1] != (rows,):
            got = f"one of {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else "none"
            rule = f"a tensor {key!r} of {rows} rows for weight"
            checks.fail(_OP, "optimizer", rule, got, verb="have")
        return tensor

    @torch.no_grad()
    def _add(self, ids: Tensor) -> None:
        first, end = 1 + len(self), 1 + len(self) + len(ids)
        if end - 1 > self.capacity:
            rule = f"at least {end - 1}, the number of features seen"
            checks.fail(_OP, "capacity", rule, self.capacity)
        self._table.add(ids)
        self.weight[first:end] = self.initial(ids)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        owner = [self.group.rank(), self.group.size()]
        destination[f"{prefix}owner"] = torch.tensor(owner, dtype=torch.int64, device="cpu")
        rows = {
            name: tensor.detach()[1 : 1 + len(self)] for name, tensor in self._per_row().items()
        }
        for name, tensor in {"ids": self.ids(), **rows}.items():
            # A copy, because a view would save the whole storage.
            destination[prefix + name] = tensor if keep_vars else tensor.clone()

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *more: Any) -> None:
        _, _, missing_keys, unexpected_keys, _ = more
        state, per_row = without_prefix(state_dict, prefix), self._per_row()
        names = ["owner", "ids", *per_row]
        missing_keys += [prefix + name for name in names if name not in state]
        unexpected_keys += [prefix + name for name in state if name not in names]
        local = self._require_state(state)
        if local is None:
            return
        device, before = self.weight.device, len(self)
        self._table = IdTable(self.capacity, device)
        self._table.add(state["ids"].to(device)[local])
        for name, tensor in per_row.items():
            tensor[1 : 1 + len(self)] = state[name].to(device)[local]
            tensor[1 + len(self) : 1 + before] = 0  # as for features without a row

    def _require_state(self, state: Mapping[str, Any]) -> Tensor | None:  # type: ignore[override]
        """Return the indices of this rank's rows in a state, or None if there is nothing to load.

        Raise unless the whole state can be loaded.
        """
        per_row = self._per_row()
        names = ["owner", "ids", *per_row]
        missing = [name for name in names if name not in state]
        if missing == names:
            return None
        if missing:  # also an error if the load is not strict
            checks.fail(_OP, "state", ", ".join(names), f"no {', '.join(missing)}", verb="have")
        require_state(_OP, "state", {name: state[name] for name in names})
        rank, ranks = state["owner"].tolist()
        own_rank, size = self.group.rank(), self.group.size()
        if rank != MERGED and (rank, ranks) != (own_rank, size):
            rule = f"that of rank {own_rank} of {size}, or one from merge_feature_rows"
            checks.fail(_OP, "state", rule, f"that of rank {rank} of {ranks}")
        ids = state["ids"].to(self.weight.device)
        for name, tensor in per_row.items():
            shape = (len(ids), *tensor.shape[1:])
            require_loadable(_OP, f"state[{name!r}]", state[name], tensor.dtype, shape)
        self.require_ids(_OP, ids)
        if len(ids.unique()) != len(ids):
            checks.fail(_OP, "state['ids']", "distinct", "some ids twice")
        owners = self.owners(ids)[0]
        others = (owners != own_rank).nonzero().squeeze(1)
        if rank != MERGED and len(others):
            index, rule = int(others[0]), f"of rank {own_rank}'s rows, as the owner of the state"
            found = f"{int(ids[index])} of rank {int(owners[index])}"
            checks.fail(_OP, "state['ids']", rule, found)
        local = (owners == own_rank).nonzero().squeeze(1)
        if len(local) > self.capacity:
            rule = f"at least {len(local)}, the rows of the state"
            checks.fail(_OP, "capacity", rule, self.capacity)
        return local
