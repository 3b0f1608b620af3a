"""States of all ranks merged into one, for any number of ranks."""

import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dct_kernels import checks

from ..agreement import named, require_same
from . import checkpoint
from .segment_state import OWNER_RESIDUAL, RESIDUAL

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
        for rank, saved in checkpoint.opened(_OP, state).items():
            if rank in told or rank == checkpoint.MEAN:
                got = "a merged one" if rank == checkpoint.MEAN else f"a second of rank {rank}"
                checks.fail(_OP, "states", "one state per rank", got, verb="hold")
            entry = checkpoint.require_entry(_OP, saved, sizes, f" of rank {rank}")
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
    return checkpoint.make(checkpoint.MEAN, merged)


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
