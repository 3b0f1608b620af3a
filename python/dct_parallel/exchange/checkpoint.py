"""Saves, checks and merges the states of all entry points.

    {"version": 6, "ranks": {"0": {"run_id": ..., "step": ..., "parameters": {name: {...}}}}}

Every rank saves its own entry, because residuals differ between ranks. With FSDP2, the ranks of a
replica share one entry, under "replicas" and the replica's number. The tensors of this entry are
DTensors that are sharded like their parameters, so torch.distributed.checkpoint can reshard them.
"""

import os
import pickle
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks

from ..groups import named, raising_together, require_same
from ..user_warnings import warn_user
from .bucket import SegmentState
from .plan import keeps_owners
from .settings import TRANSPORTS, Settings

VERSION = 6  # the version of all saved states; earlier versions are rejected
WHOLE = "whole"  # the "shard" of a rank that holds whole parameters
_MEAN = "mean"  # replaces the rank's number in the result of merge_states, which any rank loads
_RESIDUAL, _OWNER, _BASE = "residual", "owner_residual", "base"  # keys of a parameter

Entry = dict[str, Any]  # the part of a saved state that belongs to one rank or replica
States = dict[str, SegmentState]  # by parameter name
_Folder = str | os.PathLike[str]


class Field(NamedTuple):
    """The rule for a value of a dict, as text for error messages and as a predicate."""

    rule: str
    is_valid: Callable[[Any], bool]


def checked(op: str, values: Any, table: Mapping[str, Field], suffix: str = "") -> dict[str, Any]:
    """Return the values that the table has rules for. Raise if a value is missing or invalid.

    In error messages `op` is the name of the call, and `suffix` follows the name of a value.
    """
    checks.require_type(op, f"state{suffix}", values, dict, "a dict")
    for key, (rule, is_valid) in table.items():
        if key not in values or not is_valid(values[key]):
            got = _describe(values[key]) if key in values else "nothing"
            checks.fail(op, f"{key}{suffix}", rule, got)
    return {key: v.detach() if isinstance(v := values[key], Tensor) else v for key in table}


def _describe(value: Any) -> str:
    """Describe an invalid value for an error message."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    shape = "nested" if value.is_nested else list(value.shape)
    text = f"{str(value.dtype).removeprefix('torch.')} {shape} {type(value).__name__}"
    value = value.to_local() if hasattr(value, "to_local") else value
    if not checks.is_plain(value):
        return f"{text}, {value.layout} on {value.device}"
    if value.dtype not in checks.FLOATS:
        return text
    wrong = value[~value.isfinite()]
    return f"{text} with {wrong[0].item()}" if len(wrong) else text


def _tensor(shape: Sequence[int], local: Sequence[int] | None = None) -> Field:
    """The rule for a tensor, or for a DTensor whose local part has the shape `local`."""
    expected = torch.Size(shape if local is None else local)
    rule = f"a float32 {list(expected)} tensor of finite numbers"
    if local is not None:
        reshards = "(torch.distributed.checkpoint reshards)"
        rule = f"a DTensor of {list(shape)}, its local part {rule} {reshards}"

    def is_valid(v: Any) -> bool:
        if local is not None:
            v = v.to_local() if hasattr(v, "to_local") and v.shape == torch.Size(shape) else None
        matches = checks.is_plain(v) and v.dtype == torch.float32 and v.shape == expected
        return matches and bool(v.isfinite().all())

    return Field(rule, is_valid)


def integer(low: int, high: int = 2**31 - 1) -> Field:  # compressors count steps in int32
    return Field(f"an integer in [{low}, {high}]", lambda v: type(v) is int and low <= v <= high)


def _are_names(values: Iterable[object]) -> bool:
    return all(type(value) is str for value in values)


TEXT = Field("a string", lambda v: isinstance(v, str))
BY_NAME = Field("a dict with strings as keys", lambda v: isinstance(v, dict) and _are_names(v))
_FRACTION = Field("a number in (0, 1]", lambda v: type(v) in (int, float) and 0 < v <= 1)
_LISTS = Field(
    "lists of strings",
    lambda v: type(v) is list and all(type(x) is list and x and _are_names(x) for x in v),
)
_FLAG = Field("a bool", lambda v: isinstance(v, bool))
_RULE = f"{VERSION}, as dct_kernels 0.3 saves it (earlier states are not read)"
VERSION_FIELD = Field(_RULE, lambda v: type(v) is int and v == VERSION)

# The rules for an entry, by the class that saved it. "local_size" is the number of ranks per node
# of a mesh, else 1. "buckets" lists the parameter names of each bucket. "unaveraged" counts local
# steps since the last averaging. "reduction" is how gradients are reduced over the shards.
_ENTRY: dict[str, Field] = {"run_id": TEXT, "world_size": integer(1), "step": integer(0)}
_ENTRY |= {"density": _FRACTION, "format": TEXT, "refresh_every": integer(1), "parameters": BY_NAME}
_ENTRY["transport"] = Field(
    checks.either(list(map(repr, TRANSPORTS))), lambda v: isinstance(v, str) and v in TRANSPORTS
)
_START = {"start_step": integer(0, 2**63 - 1)}
_RANK = {**_ENTRY, "local_size": integer(1)}
_AVERAGER = {"period": integer(1), "shard": TEXT, "step_ahead": _FLAG, "unaveraged": integer(0)}
_REPLICA = {"replicas": integer(1), "shards": integer(1), "reduction": TEXT}
_TABLES = {
    "DCTState": {**_RANK, **_START, "buckets": _LISTS},
    "DCTAverager": {**_RANK, **_AVERAGER},
    "FullyShardState": {**_ENTRY, **_START, **_REPLICA},
}


def _class_of(entry: Any) -> str:
    keys = entry if isinstance(entry, Mapping) else {}
    known = {"replicas": "FullyShardState", "period": "DCTAverager"}
    return next((known[key] for key in known if key in keys), "DCTState")


class Flat(NamedTuple):
    """A parameter, or any flat tensor, whose whole state this rank saves."""

    numel: int

    def saved(self, state: SegmentState) -> dict[str, Any]:
        # Both transports save the same keys, because torch.distributed.checkpoint treats a tuple as
        # one value, even an empty tuple. So a state also loads with the other transport.
        owner = () if state.owner is None else (state.owner,)
        base = {} if state.base is None else {_BASE: state.base}
        return {_RESIDUAL: state.residual, _OWNER: owner, **base}

    def state(self, op: str, saved: object, entry: Entry, suffix: str = "") -> SegmentState:
        """Check a saved parameter and return its state. `suffix` is as for `checked`."""
        whole = _tensor([self.numel])
        owner = Field(
            f"a tuple, empty or with {whole.rule}",
            lambda v: isinstance(v, tuple) and len(v) < 2 and all(map(whole.is_valid, v)),
        )
        base = {_BASE: whole} if "period" in entry else {}
        found = checked(op, saved, {_RESIDUAL: whole, _OWNER: owner, **base}, suffix)
        owned = found[_OWNER][0].detach() if found[_OWNER] else None
        return SegmentState(found[_RESIDUAL], owned, found.get(_BASE))


class Sharded(NamedTuple):
    """A parameter of which each rank of a replica saves one shard.

    Attributes:
        piece: this rank's shard, an `fsdp2.units.Piece`.
        packed: how many times the parameter's bucket was packed, which is equal for all shards.
    """

    piece: Any
    packed: int = 0

    def saved(self, state: SegmentState) -> dict[str, Any]:
        """Return DTensors that are sharded like the parameter, and how often it was packed.

        "shard" contains the number of the shard for each row.
        """
        from torch.distributed.tensor import Shard, zeros  # slow to import

        parameter, mesh = self.piece.parameter, self.piece.parameter.device_mesh
        rows = parameter.shape[self.piece.dim]
        shard = zeros(rows, dtype=torch.float32, device_mesh=mesh, placements=[Shard(0)])
        shard.to_local().fill_(mesh.get_coordinate()[0])  # works without a process group
        saved: dict[str, Any] = {"packed": self.packed, "shard": shard}
        for key, value in ((_RESIDUAL, state.residual), (_OWNER, state.owner)):
            if value is not None:
                saved[key] = torch.zeros_like(parameter, dtype=torch.float32)
                saved[key].to_local().copy_(value.view(self.piece.local))
        return saved

    def state(self, op: str, saved: object, entry: Entry, suffix: str = "") -> SegmentState:
        """Check the saved shard of this rank and return its state. `suffix` as for `checked`."""
        shape, local, dim = self.piece.parameter.shape, self.piece.local, self.piece.dim
        part, rows = _tensor(shape, local), _tensor([shape[dim]], [local[dim]])
        table = {"packed": integer(0), "shard": rows, _RESIDUAL: part}
        if entry["transport"] == "reduce_scatter":
            # torch.distributed.checkpoint does not load keys that this run's state lacks.
            hint = "as reduce_scatter saves it (load_merged reads a folder of either transport)"
            table[_OWNER] = part._replace(rule=f"{part.rule}, {hint}")
        found, mesh = checked(op, saved, table, suffix), self.piece.parameter.device_mesh
        rank, shards = mesh.get_local_rank(), found["shard"].to_local()
        if entry["shards"] == mesh.size() and (shards != rank).any():
            checks.fail(op, "state", f"that of shard {rank}", f"that of shard {shards[0]:g}")
        parts = [found[k].to_local().cpu().flatten() for k in (_RESIDUAL, _OWNER) if k in found]
        return SegmentState(*parts)


_Parameters = Mapping[str, Flat | Sharded]
_ANY = " (merge_states makes a state for any number of ranks)"
_SIZES = {"world_size": _ANY, "local_size": _ANY, "replicas": " (load_merged takes any number)"}


def changeable(settings: Settings, ranks: int, **others: int) -> dict[str, Any]:
    """The settings of a run that another run may change when it loads the state, and `others`."""
    transport = "reduce_scatter" if keeps_owners(settings, ranks) else "all_gather"
    saved = {"format": settings.format, "transport": transport}
    return {**saved, "refresh_every": settings.refresh_every, **others}


class Run(NamedTuple):
    """The run that saves a state, or that a loaded state must match.

    Attributes:
        holder: whether a "rank" or a "replica" has an entry.
        number: the number of this rank or replica.
        changeable: the {key: value} pairs that need not match. A difference warns.
        same: the {key: value} pairs that a loaded entry must match.
        parameters: {name: how the parameter is saved} for this model.
    """

    holder: str
    number: int
    changeable: Mapping[str, Any]
    same: Mapping[str, Any]
    parameters: _Parameters

    def save(self, states: States, run_id: str, step: int, **others: object) -> dict[str, Any]:
        """Return a state dict with these states of the parameters and other values."""
        saved = {name: self.parameters[name].saved(state) for name, state in states.items()}
        numbers = {**self.same, **self.changeable, "run_id": run_id, "step": step, **others}
        return _made(self.holder, self.number, {**numbers, "parameters": saved})

    def find(self, state: object) -> tuple[Entry, States]:
        """Check and return the entry of this rank or replica, and the states of its parameters.

        Raises an error if the state is damaged, or was saved by a different rank or replica, with
        different settings or for a different model. The residuals of a merged state are divided
        among the ranks of a node.
        """
        op, holder, number = "load_state_dict", self.holder, str(self.number)
        found = _entries(op, state, holder)
        merged = holder == "rank" and _MEAN in found
        if not merged and number not in found:
            rule = f"{holder} {number}'s own" + ", or one from merge_states" * (holder == "rank")
            checks.fail(op, "state", rule, f"that of {holder} {', '.join(found) or 'none'}")
        if merged and self.same.get("step_ahead"):
            rule = f"rank {number}'s own with step_ahead (or flush, and start a new averager)"
            checks.fail(op, "state", rule, "one from merge_states")
        entry, states = self._checked(op, found[_MEAN if merged else number], any_size=merged)
        if merged and (local := self.same["local_size"]) > 1:
            states = {name: SegmentState(s.residual / local) for name, s in states.items()}
        return entry, states

    def find_mean(
        self, folder: _Folder, key: str, group: dist.ProcessGroup, timeout: timedelta
    ) -> tuple[Entry, States]:
        """Like `find`, for the mean of all replicas in a folder. Collective over `group`.

        If the shard of one rank is damaged, every rank raises an error.
        """
        op = "load_merged"
        with raising_together(op, group, timeout):
            loads = _loads(op, folder, key, self.holder, self.parameters)

        def read() -> Iterator[tuple[Entry, States]]:
            for load in loads:
                with raising_together(op, group, timeout):
                    (entry,) = _entries(op, load(), self.holder).values()
                    found = self._checked(op, entry, any_size=True)
                yield found

        count, entry, mean = _mean(read())
        if count != entry["replicas"]:
            checks.fail(op, "folder", f"all {entry['replicas']} replicas", count, verb="hold")
        return entry, mean

    def report_changes(self, entry: Entry) -> None:
        """Warn if this run has other settings than the run that saved the entry."""
        keys = [key for key, value in self.changeable.items() if entry[key] != value]
        if any(entry[key] != value for key, value in self.same.items() if key in _SIZES):
            keys = [key for key in keys if key != "transport"]  # may depend on the number of ranks
        if keys:
            saved, ours = (
                " and ".join(f"{key} {values[key]}" for key in keys)
                for values in (entry, self.changeable)
            )
            warn_user(
                f"DCT: the state was saved with {saved}, and this run continues with {ours}: "
                "to keep the saved settings, pass them when you create the state."
            )

    def _checked(self, op: str, saved: object, any_size: bool) -> tuple[Entry, States]:
        expected, found = _class_of(self.same), _class_of(saved)
        if expected != found and isinstance(saved, dict):
            checks.fail(op, "state", f"a {expected}'s", f"a {found}'s")
        entry = checked(op, saved, _TABLES[expected])
        for key, value in self.same.items():
            if key == "density" and (entry[key] == 1) != (value == 1):
                rule = f"{_sent(value)}, as in this run ({self.changeable['format']!r})"
                checks.fail(op, "format", rule, f"a state of {_sent(entry[key])}", verb="send")
            if entry[key] != value and not (any_size and key in _SIZES):
                checks.fail(op, key, f"{value}, as in this run{_SIZES.get(key, '')}", entry[key])
        if difference := entry["parameters"].keys() ^ self.parameters.keys():
            got = f"a difference in {', '.join(sorted(difference))}"
            checks.fail(op, "parameters", "those of this model", got)
        return entry, _states(op, entry, self.parameters)


def _sent(density: float) -> str:
    return "all entries" if density == 1 else f"the largest entries (density {density})"


def _made(holder: str, number: object, entry: Entry, version: object = VERSION) -> dict[str, Any]:
    return {"version": version, f"{holder}s": {str(number): entry}}


def _entries(op: str, state: object, holder: str) -> dict[str, Any]:
    """Return {rank or replica: its unchecked entry} for a state dict."""
    key = f"{holder}s"
    return dict(checked(op, state, {"version": VERSION_FIELD, key: BY_NAME})[key])


def _states(op: str, entry: Entry, parts: _Parameters, suffix: str = "") -> States:
    saved = entry["parameters"].items()
    return {name: parts[name].state(op, s, entry, f" of {name}{suffix}") for name, s in saved}


def _mean(found: Iterable[tuple[Entry, States]]) -> tuple[int, Entry, States]:
    """Return the number of entries, the last entry, and the mean of all states.

    The mean is computed in float64 and returned in float32.
    """
    totals: dict[str, dict[str, Any]] = {}
    count, last = 0, Entry()
    for entry, states in found:
        count, last = count + 1, entry
        for name, state in states.items():
            total = totals.setdefault(name, {})
            for part, value in vars(state).items():
                if value is not None:
                    total[part] = total.get(part, 0) + value.to("cpu", torch.float64)
    # The mean over nodes. The residual of a node is the sum over its ranks. Residuals of owners are
    # in units of the mean, so their sum is added.
    mean = {}
    for name, total in totals.items():
        residual = total["residual"] / count * last.get("local_size", 1) + total.get("owner", 0)
        base = (total["base"] / count).float() if "base" in total else None
        mean[name] = SegmentState(residual.float(), base=base)
    return count, last, mean


def merge_states(states: Iterable[dict[str, Any]] | _Folder, key: str = "dct") -> dict[str, Any]:
    """Merge the state dicts of all ranks into one that any number of ranks can load.

    The result also loads with any mesh or without one. Its residuals are the mean over ranks, or
    over the nodes of a mesh. A step applies the mean of all messages, so the pending updates of the
    model are unchanged, except for float32 rounding. No process group is needed. Source: this
    project, because the DCT paper (arXiv 2010.08899) does not change the number of ranks.

    Args:
        states: the `DCTState.state_dict()` of every rank in any order, for example from
            `torch.load(path, weights_only=True)`, or a folder that `torch.distributed.checkpoint`
            wrote. A generator or a folder is read rank by rank, with two states in memory.
            Reading a folder unpickles files, so read only folders that you trust.
        key: the name of the state in a folder, as in {"dct": state}; dots separate nested keys.

    Raises:
        ValueError: the state of a rank is missing, duplicated or damaged, or ranks differ in run,
            step, world size, node size, density or parameters.
        TypeError: `states` is not an iterable of state dicts.

    >>> merged = merge_states(torch.load(f"dct{rank}.pt", weights_only=True) for rank in range(4))
    """
    op = "merge_states"
    if isinstance(states, (str, os.PathLike)):
        states = (load() for load in _loads(op, states, key, "rank", {}))
    rule = "an iterable of all ranks' states, or a folder of them"
    checks.require_type(op, "states", states, Iterable, rule)
    _, entry, mean = _mean(_ranks(op, states))
    parameters = {name: Flat(0).saved(state) for name, state in mean.items()}
    return _made("rank", _MEAN, {**entry, "local_size": 1, "parameters": parameters})


def _ranks(op: str, states: Iterable[object]) -> Iterator[tuple[Entry, States]]:
    """Yield each rank's checked entry and states. Raise unless all ranks of one run are given."""
    seen: dict[str, Entry] = {}
    sizes: dict[str, Flat] = {}
    for state_dict in states:
        for rank, saved in _entries(op, state_dict, "rank").items():
            if rank in seen or rank == _MEAN:
                got = "a merged one" if rank == _MEAN else f"a second of rank {rank}"
                checks.fail(op, "states", "one state per rank", got, verb="hold")
            suffix = f" of rank {rank}"
            entry = checked(op, saved, _TABLES[_class_of(saved)], suffix)
            for name, state in entry["parameters"].items():
                residual = state.get(_RESIDUAL) if isinstance(state, dict) else None
                numel = residual.numel() if isinstance(residual, Tensor) else 0
                sizes.setdefault(name, Flat(numel))
            seen[rank] = {**entry, "parameters": ", ".join(entry["parameters"])}
            yield entry, _states(op, entry, sizes, suffix)
    if not seen:
        checks.fail(op, "states", "those of all ranks", "none")
    require_same(op, seen)
    if seen.keys() != set(map(str, range(entry["world_size"]))):
        checks.fail(op, "states", f"those of all {entry['world_size']} ranks", named(seen))


def _loads(
    op: str, folder: _Folder, key: str, holder: str, parameters: _Parameters
) -> list[Callable[[], dict[str, Any]]]:
    """Return a function for each rank or replica in a DCP folder, which reads the saved state.

    The functions reshard `Sharded` parameters, so with such parameters each call is collective.
    """
    import torch.distributed.checkpoint as dcp  # slow to import
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    checks.require_type(op, "key", key, str, "a string")
    rule = "a folder that torch.distributed.checkpoint wrote"
    checks.require_type(op, "folder", folder, (str, os.PathLike), rule)
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError):
        checks.fail(op, "folder", rule, repr(folder))
    prefix, version = (*key.split("."), f"{holder}s"), f"{key}.version"
    found: dict[str, dict[str, tuple[str, ...]]] = {}  # {rank or replica: {key of DCP: path}}
    for flat, path in metadata.planner_data.items():
        if path[: len(prefix)] == prefix and len(path) > len(prefix) + 1:
            found.setdefault(path[len(prefix)], {})[flat] = path[len(prefix) + 1 :]
    if not found:
        checks.fail(op, "key", f"the name of a state in {folder}", repr(key))

    def load(number: str, paths: dict[str, tuple[str, ...]]) -> dict[str, Any]:
        values: dict[str, Any] = dict.fromkeys([version, *paths])
        for flat, path in paths.items():
            stored = metadata.state_dict_metadata[flat]
            part = parameters.get(path[1]) if path[0] == "parameters" and path[1:] else None
            dtype = stored.properties.dtype if isinstance(stored, TensorStorageMetadata) else None
            # DCP converts any stored dtype to the dtype of the tensor that it reads into.
            if isinstance(part, Sharded) and dtype in (None, torch.float32):
                zeros = torch.zeros(part.piece.local, dtype=torch.float32, device="cpu")
                values[flat] = part.saved(SegmentState(zeros, zeros)).get(path[-1])
            elif isinstance(stored, TensorStorageMetadata):
                values[flat] = torch.empty(stored.size, dtype=dtype, device="cpu")
        try:
            # DCP computes shard offsets on the default device.
            with warnings.catch_warnings(), torch.device("cpu"):
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(values, checkpoint_id=folder, no_dist=not parameters)
        except dcp.CheckpointException as error:  # a BaseException, on all ranks
            why = next(iter(error.failures.values()))[0]
            checks.fail(op, "folder", f"a state that fits in {key!r}", why, verb="hold")
        entry: Entry = {}
        for flat, (*names, last) in paths.items():
            reduce(lambda below, n: below.setdefault(n, {}), names, entry)[last] = values[flat]
        return _made(holder, number, entry, values[version])

    return [partial(load, number, paths) for number, paths in sorted(found.items())]
