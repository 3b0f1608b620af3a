"""What a checkpoint of the training layer holds, and whether one fits.

    {"version": 3, "ranks": {"0": {run_id, world_size, step, density, parameters: {name: ...}}}}

Version 3 holds what owners keep (transport "shard"); without, it is 2.

Below "ranks" stands the rank that it belongs to, because torch.distributed.checkpoint saves
what has the same key on several ranks once, and then hands it to all of them. Numbers, strings and
tensors only, so torch.load(weights_only=True) reads it.
"""

import warnings
from typing import TypedDict

import torch
from torch import Tensor

from dct_kernels import checks

from .bucket_plan import Settings

VERSION, OWNERS_VERSION = 2, 3
MEAN = "mean"  # in place of a rank: made by merge_states for every rank

SegmentState = dict[str, Tensor]  # see Compressor.segment_state
OWNER = "owner_"  # begins the keys of what a rank keeps as the owner of a part of the parameter
OWED = OWNER + "residual"  # as long as the parameter, 0 outside of that part; units of the mean


class Entry(TypedDict):
    """One rank's part of a checkpoint."""

    run_id: str  # made when training began
    world_size: int
    step: int
    density: float
    recent: Tensor  # see History.state
    parameters: dict[str, SegmentState]


def make(rank: int | str, entry: Entry) -> dict:
    """The state dict of one rank, or the one for all."""
    owners = any(OWED in state for state in entry["parameters"].values())
    return {"version": OWNERS_VERSION if owners else VERSION, "ranks": {str(rank): entry}}


def fresh(numel: int) -> SegmentState:
    """What a parameter starts from: nothing owed, no threshold sampled."""
    return {
        "residual": torch.zeros(numel),
        "threshold": torch.zeros(()),
        "reference": torch.zeros(()),
        "sample_next": torch.zeros(()),
    }


def fresh_owner(numel: int) -> SegmentState:
    """The same of an owner's part, whose threshold is sampled as soon as there is something."""
    state = fresh(numel) | {"sample_next": torch.ones(())}
    return {OWNER + key: value for key, value in state.items()}


def owed(state: SegmentState, ranks: int) -> Tensor:
    """What one of so many ranks owes to the sum of gradients, as the owner of a part, too."""
    return state["residual"] + ranks * state.get(OWED, 0)


def entries(op: str, state: dict) -> dict[str, Entry]:
    """{rank: entry} of a state dict of these versions."""
    version = state.get("version")
    if version not in (VERSION, OWNERS_VERSION):
        checks.fail(op, "version", f"{VERSION} or {OWNERS_VERSION}", version)
    for entry in state["ranks"].values():
        parameters = entry["parameters"].values()
        if version == OWNERS_VERSION and not all(OWED in saved for saved in parameters):
            # DCP reads what the state that loads has a place for, and says nothing of the rest.
            rule = "with what owners keep: load into transport 'shard', or use merge_states"
            checks.fail(op, "state", rule, "one without")
    return state["ranks"]


def find(
    state: dict, rank: int, world_size: int, settings: Settings, sizes: dict[str, int]
) -> Entry:
    """This rank's entry; refuses another rank's, another world size, density or model.

    Args:
        state: from `make`.
        rank, world_size, settings: this run's.
        sizes: {name: numel} of this model's parameters.
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
    return entry
