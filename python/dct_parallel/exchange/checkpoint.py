"""The checkpoint of the training layer: its contents, and whether one fits.

    {"version": 6, "ranks": {"0": {run_id, world_size, step, density, parameters: {name: ...}}}}

An owner's residual is in a tuple, which is empty where a rank owns nothing.
torch.distributed.checkpoint takes a tuple as it is, so states of both transports have the same
keys, and either is read into the other.

With a mesh, the node's residual is the sum of its ranks', in units of the node's mean, and each
rank's is as long as the parameter, 0 outside of its part.

The key below "ranks" is the rank, because torch.distributed.checkpoint saves equal keys of several
ranks once, and then loads that on all of them. Numbers, strings, tensors, tuples and lists only, so
torch.load(weights_only=True) reads it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dct_kernels import checks

from ..agreement import named
from . import fields
from .codec import Settings
from .segment_state import OWNER_RESIDUAL, RESIDUAL

# Of every saved state of this package. States of versions 1 to 5 were of unreleased code.
VERSION = 6
BASE = "base"  # of a DCTAverager
WHOLE = "whole"  # in place of a shard: those of a module that is not sharded
MEAN = "mean"  # in place of a rank: made by merge_states for every rank


# The contents of one rank's part, key by key; with `default=None` a key may be absent.

ENTRY = {  # also of sharded states
    "run_id": fields.TEXT,  # made when training began
    "world_size": fields.integer(1),
    "step": fields.integer(0),
    "density": fields.FRACTION,
    "parameters": fields.BY_NAME,  # of each, see SegmentState.as_dict
}
_ENTRY = ENTRY | {
    "local_size": fields.integer(1),  # ranks in each node of a mesh, else 1
    "buckets": fields.NAMES._replace(default=[]),  # of a DCTState: the parameters of each
    # Of a DCTAverager:
    "period": fields.integer(1, default=None),
    "shard": fields.TEXT._replace(default=None),  # which one of how many its weights are
    "step_ahead": fields.FLAG._replace(default=None),
    "unaveraged": fields.integer(0, default=None),  # steps that only this rank's weights have
}
_RULE = f"{VERSION}, as dct_kernels 0.3 saves it (earlier states are not read)"
IS_VERSION = {"version": fields.integer(VERSION, VERSION)._replace(rule=_RULE)}
_STATE = IS_VERSION | {"ranks": fields.BY_NAME}


def _segment(numel: int) -> dict[str, fields.Field]:
    """The table of one parameter."""
    return {
        RESIDUAL: fields.tensor([numel]),
        OWNER_RESIDUAL: fields.at_most_one(fields.tensor([numel])),
        BASE: fields.tensor([numel], default=None),
    }


def make(rank: int | str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of one rank, or the one for all."""
    return {"version": VERSION, "ranks": {str(rank): dict(entry)}}


def opened(op: str, state: object) -> dict[str, Any]:
    """{rank: its entry, unchecked} of a state dict."""
    entries: dict[str, Any] = fields.checked(op, state, _STATE)["ranks"]
    return entries


def require_entry(op: str, saved: object, sizes: dict[str, int], of: str = "") -> dict[str, Any]:
    """An entry of a state dict; raises unless all of it keeps the tables' rules.

    Args:
        op: for errors.
        saved: the entry, of any type.
        sizes: {name: numel} of parameters, as far as they are known.
        of: the entry's owner, for errors: "" or " of ...".
    """
    entry = fields.checked(op, saved, _ENTRY, of)
    parameters = {}
    for name, segment in entry["parameters"].items():
        table = _segment(sizes.get(name, _numel(segment)))
        parameters[name] = fields.checked(op, segment, table, f" of {name}{of}")
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
        shard = fields.checked(op, saved, _ENTRY).get("shard", WHOLE)
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
