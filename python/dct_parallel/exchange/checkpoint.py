"""States of all ranks merged into one, for any number of ranks."""

import dataclasses
import os
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dct_kernels import checks

from ..groups import named, require_same
from .settings import Settings

# Keys of checkpoints.
RESIDUAL, OWNER_RESIDUAL = "residual", "owner_residual"


@dataclasses.dataclass(frozen=True)
class SegmentState:
    """A segment of a flat tensor, which is a parameter or a part of one.

    Attributes:
        residual: float32 [numel], entries that this rank has not sent yet.
        owner: those that it has not sent as the owner of a range of the bucket, in units of the
            mean: as long as the segment, 0 outside of the range. None: it owns nothing here.
    """

    residual: Tensor
    owner: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "SegmentState":
        """A state with `change` applied to each tensor."""
        owner = None if self.owner is None else change(self.owner)
        return SegmentState(change(self.residual), owner)

    def with_owner(self) -> "SegmentState":
        """The same; if it owns nothing, with zeros."""
        nothing = torch.zeros_like(self.residual)
        return SegmentState(self.residual, nothing if self.owner is None else self.owner)

    def share(self, ranks: int) -> Tensor:
        """The contribution of one of so many ranks to the sum of gradients that sends all of it."""
        if self.owner is None:
            return self.residual
        return self.residual + ranks * self.owner

    def as_dict(self) -> dict[str, Any]:
        """As a checkpoint of one rank holds it.

        The owner's is in a tuple, or an empty one is there: torch.distributed.checkpoint takes a
        tuple as it is, so that a state of either transport is read into one of the other.
        """
        owner = () if self.owner is None else (self.owner,)
        return {RESIDUAL: self.residual, OWNER_RESIDUAL: owner}

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> "SegmentState":
        """From a checkpoint."""
        return SegmentState(saved[RESIDUAL], *saved[OWNER_RESIDUAL])


REQUIRED = object()
_LAST = 2**31 - 1  # compressors count steps in int32


class Field(NamedTuple):
    """A row of a table.

    Attributes:
        rule: what a value must be, as errors say it.
        flaw: gives the error's text for a value that breaks the rule, else None.
        default: of a missing value; None if it has none.
    """

    rule: str
    flaw: Callable[[Any], object]
    default: Any = REQUIRED


def checked(op: str, values: object, table: dict[str, Field], of: str = "") -> dict[str, Any]:
    """The values that the table has a row for, and its defaults; others are left out.

    Args:
        op: for errors.
        values: a dict, or else an error.
        of: the owner of the values, for errors: "" or " of ...".

    Raises:
        TypeError: `values` is not a dict.
        ValueError: a value is missing, or breaks its rule; the text names it.
    """
    if not isinstance(values, dict):
        checks.fail(op, f"state{of}", "a dict", type(values).__name__, TypeError)
    found = {}
    for key, field in table.items():
        if key in values:
            value = values[key]
            flaw = field.flaw(value)
            if flaw is not None:
                checks.fail(op, f"{key}{of}", field.rule, flaw)
            found[key] = value.detach() if isinstance(value, Tensor) else value
        elif field.default is REQUIRED:
            checks.fail(op, f"{key}{of}", field.rule, "nothing")
        elif field.default is not None:
            found[key] = field.default
    return found


def integer(low: int, high: int = _LAST, default: Any = REQUIRED) -> Field:
    rule = f"an integer in [{low}, {high}]" if low < high else f"{low}"
    return _field(rule, lambda value: _is_number(value, int) and low <= value <= high, default)


def tensor(shape: Sequence[int], default: Any = REQUIRED) -> Field:
    """A float32 tensor of finite numbers, on any device."""

    def flaw(value: object) -> object:
        if type(value) is not Tensor:  # of a DTensor the local part is checked
            return type(value).__name__
        if value.layout is not torch.strided or value.is_meta:
            return f"one on {value.device}, {value.layout}"
        if value.dtype != torch.float32 or value.shape != torch.Size(shape):
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        wrong = value[~value.isfinite()]
        return wrong[0].item() if len(wrong) else None

    return Field(f"a float32 {list(shape)} tensor of finite numbers", flaw, default)


def at_most_one(of: Field) -> Field:
    """A tuple that is empty, or holds one value of this rule."""

    def flaw(value: object) -> object:
        if not isinstance(value, tuple):
            return type(value).__name__
        return f"{len(value)} values" if len(value) > 1 else of.flaw(*value) if value else None

    return Field(f"a tuple, empty or with {of.rule}", flaw)


def _field(rule: str, holds: Callable[[Any], bool], default: Any = REQUIRED) -> Field:
    return Field(rule, lambda value: None if holds(value) else reprlib.repr(value), default)


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


TEXT = _field("a string", lambda v: isinstance(v, str))
FLAG = _field("a bool", lambda v: isinstance(v, bool))
FRACTION = _field("a number in (0, 1]", lambda v: _is_number(v, (int, float)) and 0 < v <= 1)
NAMES = _field(
    "lists of strings",
    lambda v: (
        isinstance(v, list)
        and all(isinstance(own, list) and own and all(type(k) is str for k in own) for own in v)
    ),
)
BY_NAME = _field(
    "a dict with strings as keys", lambda v: isinstance(v, dict) and all(type(k) is str for k in v)
)


# Of every saved state of this package. States of versions 1 to 5 were of unreleased code.
VERSION = 6
BASE = "base"  # of a DCTAverager
WHOLE = "whole"  # in place of a shard: those of a module that is not sharded
MEAN = "mean"  # in place of a rank: made by merge_states for every rank


# The contents of one rank's part, key by key; with `default=None` a key may be absent.

ENTRY = {  # also of sharded states
    "run_id": TEXT,  # made when training began
    "world_size": integer(1),
    "step": integer(0),
    "density": FRACTION,
    "parameters": BY_NAME,  # of each, see SegmentState.as_dict
}
_ENTRY = ENTRY | {
    "local_size": integer(1),  # ranks in each node of a mesh, else 1
    "buckets": NAMES._replace(default=[]),  # of a DCTState: the parameters of each
    # Of a DCTAverager:
    "period": integer(1, default=None),
    "shard": TEXT._replace(default=None),  # which one of how many its weights are
    "step_ahead": FLAG._replace(default=None),
    "unaveraged": integer(0, default=None),  # steps that only this rank's weights have
}
_RULE = f"{VERSION}, as dct_kernels 0.3 saves it (earlier states are not read)"
IS_VERSION = {"version": integer(VERSION, VERSION)._replace(rule=_RULE)}
_STATE = IS_VERSION | {"ranks": BY_NAME}


def _segment(numel: int) -> dict[str, Field]:
    """The table of one parameter."""
    return {
        RESIDUAL: tensor([numel]),
        OWNER_RESIDUAL: at_most_one(tensor([numel])),
        BASE: tensor([numel], default=None),
    }


def make(rank: int | str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of one rank, or the one for all."""
    return {"version": VERSION, "ranks": {str(rank): dict(entry)}}


def opened(op: str, state: object) -> dict[str, Any]:
    """{rank: its entry, unchecked} of a state dict."""
    entries: dict[str, Any] = checked(op, state, _STATE)["ranks"]
    return entries


def require_entry(op: str, saved: object, sizes: dict[str, int], of: str = "") -> dict[str, Any]:
    """An entry of a state dict; raises unless all of it keeps the tables' rules.

    Args:
        op: for errors.
        saved: the entry, of any type.
        sizes: {name: numel} of parameters, as far as they are known.
        of: the entry's owner, for errors: "" or " of ...".
    """
    entry = checked(op, saved, _ENTRY, of)
    parameters = {}
    for name, segment in entry["parameters"].items():
        table = _segment(sizes.get(name, _numel(segment)))
        parameters[name] = checked(op, segment, table, f" of {name}{of}")
    return {**entry, "parameters": parameters}


def _numel(segment: object) -> int:
    """Elements of a parameter, from its saved residual alone."""
    residual = segment.get(RESIDUAL) if isinstance(segment, dict) else None
    return residual.numel() if isinstance(residual, Tensor) else 0


def find(
    state: object,
    rank: int,
    settings: Settings,
    sizes: dict[str, int],
    world_size: int,
    local_size: int = 1,
    averager: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """This rank's entry, checked as a whole; raises for a different rank, world size, settings or
    model.

    Residuals of a merged state are divided among the ranks of a node.

    Args:
        state: from `make`.
        rank, settings: this run's.
        sizes: {name: numel} of this model's parameters.
        world_size, local_size: the number of ranks, and of those per node of a mesh.
        averager: settings of a DCTAverager; None: the state must be a DCTState's.
    """
    op = "load_state_dict"
    found = opened(op, state)
    saved = found.get(MEAN, found.get(str(rank)))
    if saved is None:
        got = f"that of {named(found)}"
        checks.fail(op, "state", f"rank {rank}'s own, or one from merge_states", got)
    if averager is not None:  # before sizes, which follow from it
        shard = checked(op, saved, _ENTRY).get("shard", WHOLE)
        if shard != averager["shard"]:
            checks.fail(op, "shard", f"{averager['shard']}, as in this run", shard)
        if averager["step_ahead"] and MEAN in found:
            rule = f"rank {rank}'s own with step_ahead (or flush, and start anew)"
            checks.fail(op, "state", rule, "one from merge_states")
    entry = require_entry(op, saved, sizes)
    parameters = entry["parameters"]
    based = {name for name, segment in parameters.items() if BASE in segment}
    if averager is None and ("period" in entry or based):
        checks.fail(op, "state", "a DCTState's", "a DCTAverager's")
    if averager is not None and sizes.keys() - based:
        checks.fail(op, "state", "a DCTAverager's", "one without a base")
    same = {"density": settings.density, **(averager or {})}
    if MEAN not in found:
        same |= {"world_size": world_size, "local_size": local_size}
    for key, here in same.items():
        saved = entry.get(key, "none")
        if saved != here:
            merge = " (merge_states makes a state for any number of ranks)" * ("_size" in key)
            checks.fail(op, key, f"{here}, as in this run{merge}", saved)
    difference = parameters.keys() ^ sizes.keys()
    if difference:
        got = f"a difference in {', '.join(sorted(difference))}"
        checks.fail(op, "parameters", "those of this model", got)
    dealt = [name for names in entry["buckets"] for name in names]
    if len(set(dealt)) < len(dealt) or set(dealt) - sizes.keys():
        rule = "lists of parameters of this model, each of them once"
        checks.fail(op, "buckets", rule, ", ".join(dealt))
    if MEAN in found and local_size > 1:
        parameters = {
            name: segment | {"residual": segment["residual"] / local_size}
            for name, segment in parameters.items()
        }
    return {**entry, "parameters": parameters}


_OP = "merge_states"


def merge_states(
    states: Iterable[dict[str, Any]] | str | os.PathLike[str], key: str = "dct"
) -> dict[str, Any]:
    """One state dict from those of all ranks of a run, for every rank of a run of different size.

    Its residuals are the ranks' mean. A step applies the mean over ranks of their messages, so the
    pending updates of the model stay the same on any number of ranks, to float32 rounding (summed
    in float64). With a mesh it is the mean of nodes, whose ranks hold a part each. The residuals of
    owners (transport "reduce_scatter") are in units of the mean, and are added as they are.
    Nothing that is given is mutated, and no process group is needed. Our reconstruction: the paper
    does not change the number of ranks.

    Args:
        states: every rank's `DCTState.state_dict()` in any order, say as
            `torch.load(path, weights_only=True)` returns them, or a folder that
            `torch.distributed.checkpoint` wrote. A generator or a folder is read rank by rank, with
            two ranks' states in memory at a time.
        key: in a folder, the name the state was saved under, {"dct": state}; dots go deeper.

    Returns:
        A state dict for `DCTState.load_state_dict` at any world size, in any mesh or in none. Not
        to be merged again.

    Raises:
        ValueError: a rank's state is missing or there twice, something in it is missing, of a wrong
            type or shape or not finite, or run, step, world size, size of nodes, density or
            parameters differ.
        TypeError: `states` holds no states.

    >>> merged = merge_states(torch.load(f"dct{rank}.pt", weights_only=True) for rank in range(4))
    """
    if isinstance(states, (str, os.PathLike)):
        states = _from_folder(states, key)
    if not isinstance(states, Iterable):
        rule = "an iterable of all ranks' states, or a folder of them"
        checks.fail(_OP, "states", rule, type(states).__name__, TypeError)
    told: dict[str, dict[str, Any]] = {}  # {rank: its numbers}
    sums: dict[str, dict[str, Tensor]] = {}
    sizes: dict[str, int] = {}  # of the parameters that were seen
    for state in states:
        for rank, saved in opened(_OP, state).items():
            if rank in told or rank == MEAN:
                got = "a merged one" if rank == MEAN else f"a second of rank {rank}"
                checks.fail(_OP, "states", "one state per rank", got, verb="hold")
            entry = require_entry(_OP, saved, sizes, f" of rank {rank}")
            told[rank] = {k: v for k, v in entry.items() if k != "parameters"}
            told[rank]["parameters"] = ", ".join(
                f"{name} ({', '.join(segment)})" for name, segment in entry["parameters"].items()
            )
            for name, segment in entry["parameters"].items():
                sizes[name] = segment[RESIDUAL].numel()
                total = sums.setdefault(name, {})
                for part, value in segment.items():
                    for tensor in value if part == OWNER_RESIDUAL else (value,):
                        total[part] = total.get(part, 0) + tensor.to("cpu", torch.float64)
    if not told:
        checks.fail(_OP, "states", "those of all ranks", "none")
    require_same(_OP, told)
    numbers = next(iter(told.values()))
    world_size = numbers["world_size"]
    if len(told) != world_size:
        checks.fail(_OP, "states", f"those of all {world_size} ranks", named(told))
    local_size = numbers["local_size"]
    mean = {name: _mean(total, world_size, local_size) for name, total in sums.items()}
    merged = {**numbers, "local_size": 1, "parameters": mean}
    return make(MEAN, merged)


def _mean(total: dict[str, Tensor], ranks: int, local_size: int) -> dict[str, Any]:
    """The merged state of one parameter, from sums over ranks."""
    mean = {key: value / ranks for key, value in total.items() if key != OWNER_RESIDUAL}
    mean[RESIDUAL] = mean[RESIDUAL] * local_size
    if OWNER_RESIDUAL in total:  # one owner per element, in units of the mean
        mean[RESIDUAL] = mean[RESIDUAL] + total[OWNER_RESIDUAL]
    return {key: value.float() for key, value in mean.items()} | {OWNER_RESIDUAL: ()}


def _from_folder(folder: str | os.PathLike[str], key: str) -> Iterator[dict[str, Any]]:
    """The state dicts, rank by rank, as torch.distributed.checkpoint saved them."""
    import torch.distributed.checkpoint as dcp  # late: it takes a second to import
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(folder).read_metadata()
    prefix = tuple(key.split("."))
    # {rank: {keys from the top down: what to read into}}
    ranks: dict[str, dict[tuple[str, ...], Tensor | None]] = {}
    for flat, path in metadata.planner_data.items():
        if path[: len(prefix) + 1] == (*prefix, "ranks"):
            stored, place = metadata.state_dict_metadata[flat], None
            if isinstance(stored, TensorStorageMetadata):
                place = torch.empty(stored.size, dtype=stored.properties.dtype)
            ranks.setdefault(path[len(prefix) + 1], {(*prefix, "version"): None})[path] = place
    if not ranks:
        checks.fail(_OP, "key", f"the name of a state in {folder}", repr(key))
    for places in ranks.values():
        tree: dict[str, Any] = {}
        for path, place in places.items():
            _set(tree, path, place)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(tree, checkpoint_id=folder, no_dist=True)
        for name in prefix:
            tree = tree[name]
        yield tree


def _set(tree: dict[str, Any], path: tuple[str, ...], leaf: object) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf
