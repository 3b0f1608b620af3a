"""The checkpoint of the training layer: its contents, and whether one fits.

    {"version": 2, "ranks": {"0": {run_id, world_size, step, density, parameters: {name: ...}}}}

The version is 2, plus 1 with residuals of owners (transport "reduce_scatter"), plus 2 with a mesh:
then the node's residual is the sum of its ranks', in units of the node's mean, and each rank's is
as long as the parameter, 0 outside of its part.

The key below "ranks" is the rank, because torch.distributed.checkpoint saves equal keys of several
ranks once, and then loads that on all of them. Numbers, strings and tensors only, so
torch.load(weights_only=True) reads it.
"""

import warnings
from collections.abc import Mapping
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from dct_kernels import checks

from ..agreement import named
from . import fields
from .codec import Settings
from .recent_stats import RECENT_STEPS
from .segment_state import OWNER_RESIDUAL, RESIDUAL

VERSION, OWNERS, PARTS = 2, 1, 2
BASE, STARTED = "base", "started"  # of a DCTAverager; weights as an exchange under way began
MEAN = "mean"  # in place of a rank: made by merge_states for every rank


class _OfMesh(TypedDict, total=False):
    local_size: int  # ranks in each node of a mesh, if more than one


class Sizes(_OfMesh):
    """How many ranks there are."""

    world_size: int


class _Optional(TypedDict, total=False):
    period: int  # of a DCTAverager; early states leave out this and the next two
    residual_decay: float
    overlap: int
    recent: Tensor  # see RecentStats.state; early states leave it out


class Entry(Sizes, _Optional):
    """One rank's part of a checkpoint."""

    run_id: str  # made when training began
    step: int
    density: float
    parameters: dict[str, dict[str, Tensor]]  # see SegmentState.as_dict


# The tables that a state is checked against, key by key; with `default=None` a key may be absent.

ENTRY = {  # also of sharded states
    "run_id": fields.TEXT,
    "world_size": fields.integer(1),
    "step": fields.integer(0),
    "density": fields.FRACTION,
    "parameters": fields.BY_NAME,
}
_RECENT = fields.tensor(
    (RECENT_STEPS, 2),
    torch.float64,
    lambda x: ((x >= 0) & (x <= 1)) | x.isnan().all(1, keepdim=True),
    "fractions, or nan in the rows of steps not taken",
    default=None,
)
_ENTRY = ENTRY | {
    "local_size": fields.integer(1, default=None),
    "period": fields.integer(1, default=None),
    "residual_decay": fields.FRACTION._replace(default=None),
    "overlap": fields.integer(0, default=None),
    "recent": _RECENT,
}
_BEFORE: dict[str, object] = {"residual_decay": 1.0, "overlap": 0}  # there were such settings
_STATE = {"version": fields.integer(VERSION, VERSION + OWNERS + PARTS), "ranks": fields.BY_NAME}


def _segment(numel: int) -> dict[str, fields.Field]:
    """The table of one parameter; thresholds in earlier states are ignored, and sampled anew."""
    return {
        RESIDUAL: fields.tensor([numel]),
        OWNER_RESIDUAL: fields.tensor([numel], default=None),
        BASE: fields.tensor([numel], default=None),
        STARTED: fields.tensor([numel], default=None),
    }


def make(rank: int | str, entry: Entry) -> dict[str, Any]:
    """The state dict of one rank, or the one for all."""
    owners = any(OWNER_RESIDUAL in state for state in entry["parameters"].values())
    version = VERSION + OWNERS * owners + PARTS * ("local_size" in entry)
    return {"version": version, "ranks": {str(rank): entry}}


def opened(op: str, state: object) -> tuple[int, dict[str, Any]]:
    """The version of a state dict, and {rank: its entry, unchecked}."""
    found = fields.checked(op, state, _STATE)
    return found["version"], found["ranks"]


def require_entry(
    op: str, version: int, saved: object, sizes: dict[str, int], of: str = ""
) -> Entry:
    """An entry of a state dict of this version; raises unless all of it keeps the tables' rules.

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
    # DCP reads only keys that the loading state has, and does not report the rest.
    owners, parts = (version - VERSION) & OWNERS, (version - VERSION) & PARTS
    if owners and not all(OWNER_RESIDUAL in segment for segment in parameters.values()):
        rule = "owners' residuals (load into transport 'reduce_scatter', or use merge_states)"
        checks.fail(op, f"state{of}", rule, "none", verb="have")
    if parts and "local_size" not in entry:
        rule = "a local_size (load into a state with a mesh, or use merge_states)"
        checks.fail(op, f"state{of}", rule, "none", verb="have")
    return cast(Entry, {**entry, "parameters": parameters})


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
) -> Entry:
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
    version, found = opened(op, state)
    saved = found.get(MEAN, found.get(str(rank)))
    if saved is None:
        got = f"that of {named(found)}"
        checks.fail(op, "state", f"rank {rank}'s own, or one from merge_states", got)
    entry = require_entry(op, version, saved, sizes)
    parameters = entry["parameters"]
    based = {name for name, segment in parameters.items() if BASE in segment}
    if averager is None and ("period" in entry or based):
        checks.fail(op, "state", "a DCTState's", "a DCTAverager's")
    if MEAN not in found:
        why = ", as in this run (merge_states makes a state for any number of ranks)"
        _require_same(op, "world_size", world_size, entry["world_size"], why)
        _require_same(op, "local_size", local_size, entry.get("local_size", 1), why)
    why = ", as in this run"
    _require_same(op, "density", settings.density, entry["density"], why)
    for key, here in (averager or {}).items():
        _require_same(op, key, here, dict(entry).get(key, _BEFORE.get(key, here)), why)
    difference = parameters.keys() ^ sizes.keys()
    if parameters and difference:
        got = f"a difference in {', '.join(sorted(difference))}"
        checks.fail(op, "parameters", "those of this model", got)
    if averager is not None and sizes.keys() - based:
        checks.fail(op, "state", "a DCTAverager's", "one without a base")
    if not parameters and sizes:
        warnings.warn(
            f"DCT: the checkpoint of step {entry['step']} holds no residuals: what was not "
            "sent before it is lost.",
            stacklevel=3,
        )
    if MEAN in found and local_size > 1:
        parameters = {
            name: segment | {"residual": segment["residual"] / local_size}
            for name, segment in parameters.items()
        }
    return {**entry, "parameters": parameters}


def _require_same(op: str, key: str, here: object, saved: object, why: str) -> None:
    if saved != here:
        checks.fail(op, key, f"{here}{why}", saved)
