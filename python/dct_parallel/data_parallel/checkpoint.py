"""What a checkpoint of the training layer holds, and whether one fits.

    {"version": 2, "ranks": {"0": {run_id, world_size, step, density, parameters: {name: ...}}}}

The version is 2, and one more with what owners keep (transport "shard"); of a mesh two more: then
the ranks of a node owe together what is in their residuals, in units of the node's mean, and a
rank's own is as long as the parameter, 0 outside of its part.

Below "ranks" stands the rank that it belongs to, because torch.distributed.checkpoint saves
what has the same key on several ranks once, and then hands it to all of them. Numbers, strings and
tensors only, so torch.load(weights_only=True) reads it.
"""

import warnings
from typing import Any, TypedDict

import torch
from torch import Tensor

from dct_kernels import checks

from .bucket_plan import Settings

VERSION, OWNERS, PARTS = 2, 1, 2
MEAN = "mean"  # in place of a rank: made by merge_states for every rank

SegmentState = dict[str, Tensor]  # see Compressor.segment_state
OWNER = "owner_"  # begins the keys of what a rank keeps as the owner of a part of the parameter
OWED = OWNER + "residual"  # as long as the parameter, 0 outside of that part; units of the mean


class _OfMesh(TypedDict, total=False):
    local_size: int  # ranks in each node, if more than one


class Sizes(_OfMesh):
    """How many ranks there are."""

    world_size: int


class Entry(Sizes):
    """One rank's part of a checkpoint."""

    run_id: str  # made when training began
    step: int
    density: float
    recent: Tensor  # see History.state
    parameters: dict[str, SegmentState]


def make(rank: int | str, entry: Entry) -> dict[str, Any]:
    """The state dict of one rank, or the one for all."""
    owners = any(OWED in state for state in entry["parameters"].values())
    version = VERSION + OWNERS * owners + PARTS * ("local_size" in entry)
    return {"version": version, "ranks": {str(rank): entry}}


def fresh(numel: int, sample_next: bool = False) -> SegmentState:
    """What a parameter starts from: nothing owed, no threshold sampled.

    Args:
        sample_next: whether to sample as soon as there is something, rather than when it is time.
    """
    return {
        "residual": torch.zeros(numel),
        "threshold": torch.zeros(()),
        "reference": torch.zeros(()),
        "sample_next": torch.tensor(float(sample_next)),
    }


def fresh_owner(numel: int) -> SegmentState:
    """The same of an owner's part."""
    return {OWNER + key: value for key, value in fresh(numel, sample_next=True).items()}


def owed(state: SegmentState, ranks: int) -> Tensor:
    """What one of so many ranks owes to the sum of gradients, as the owner of a part, too."""
    return state["residual"] + ranks * state.get(OWED, 0)


def entries(op: str, state: dict[str, Any]) -> dict[str, Entry]:
    """{rank: entry} of a state dict of these versions."""
    if not isinstance(state, dict):
        checks.fail(op, "state", "a state_dict, of every rank one", type(state).__name__, TypeError)
    version: Any = state.get("version")
    newest = VERSION + OWNERS + PARTS
    if version not in range(VERSION, newest + 1):
        checks.fail(op, "version", f"{VERSION} to {newest}", version)
    if not isinstance(state.get("ranks"), dict):
        checks.fail(op, "state", "with its rank's entry", f"the keys {', '.join(state)}")
    owners, parts = (version - VERSION) & OWNERS, (version - VERSION) & PARTS
    found: dict[str, Entry] = state["ranks"]
    for entry in found.values():
        # DCP reads what the state that loads has a place for, and says nothing of the rest.
        if owners and not all(OWED in saved for saved in entry["parameters"].values()):
            rule = "with what owners keep: load into transport 'shard', or use merge_states"
            checks.fail(op, "state", rule, "one without")
        if parts and "local_size" not in entry:
            rule = "with its local_size: load into a state with a mesh, or use merge_states"
            checks.fail(op, "state", rule, "one without")
    return found


def find(
    state: dict[str, Any],
    rank: int,
    settings: Settings,
    sizes: dict[str, int],
    world_size: int,
    local_size: int = 1,
) -> Entry:
    """This rank's entry; refuses another rank's, another world size, density or model.

    Of one for all ranks, those of a node owe their share each.

    Args:
        state: from `make`.
        rank, settings: this run's.
        sizes: {name: numel} of this model's parameters.
        world_size, local_size: how many ranks there are, and in each node of a mesh.
    """
    op = "load_state_dict"
    found = entries(op, state)
    entry = found.get(MEAN, found.get(str(rank)))
    if entry is None:
        got = f"that of rank {', '.join(found)}"
        checks.fail(op, "state", f"rank {rank}'s own, or one from merge_states", got)
    if MEAN not in found and entry["world_size"] != world_size:
        rule = f"{world_size} as in this run (merge_states makes a state for any)"
        checks.fail(op, "world_size", rule, entry["world_size"])
    if MEAN not in found and entry.get("local_size", 1) != local_size:
        rule = f"{local_size} as in this run (merge_states makes a state for any)"
        checks.fail(op, "local_size", rule, entry.get("local_size", 1))
    if entry["density"] != settings.density:
        checks.fail(
            op, "density", f"{settings.density}, as this state was made with", entry["density"]
        )
    parameters = entry["parameters"]
    if not parameters and sizes:
        warnings.warn(
            f"DCT: the checkpoint of step {entry['step']} holds no residuals: what they owed to "
            "the model is lost, and thresholds are found anew.",
            stacklevel=3,
        )
        return entry
    # Of those sent whole little is owed, and early states of this version leave them out.
    optional = {name for name, numel in sizes.items() if settings.is_whole(numel)}
    difference = (parameters.keys() ^ sizes.keys()) - (optional - parameters.keys())
    if difference:
        got = f"a difference in {', '.join(sorted(difference))}"
        checks.fail(op, "parameters", "those of this model", got)
    for name, saved in parameters.items():
        for part in saved.keys() & {"residual", OWED}:
            if list(saved[part].shape) != [sizes[name]]:
                checks.fail(op, f"{part} of {name}", f"[{sizes[name]}]", list(saved[part].shape))
    if MEAN in found and local_size > 1:
        shares = {
            name: saved | {"residual": saved["residual"] / local_size}
            for name, saved in parameters.items()
        }
        return {**entry, "parameters": shares}
    return entry
