"""The checkpoint of a sharded state: its contents, and whether one fits.

    {"version": 6, "replicas": {"0": {run_id, world_size, ..., parameters: {name: {...}}}}}

Its key is the replica, because replicas keep different residuals of the same parameters. Inside a
replica everything is cut as its parameters are, in DTensors, which torch.distributed.checkpoint
reshards to any number of shards: a residual has the shape of its parameter, and "shard" the
shard's number, once for each row of the dimension that is cut.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dct_kernels import checks

from ..exchange import checkpoint
from ..exchange.checkpoint import ENTRY, IS_VERSION, OWNER_RESIDUAL, RESIDUAL, VERSION, SegmentState
from .units import Piece

Entry = dict[str, Any]  # one replica's part of a checkpoint, of which each rank holds a shard
_ENTRY = ENTRY | {
    "replicas": checkpoint.integer(1),
    "shards": checkpoint.integer(1),
    "transport": checkpoint.TEXT,
    "reduction": checkpoint.TEXT,  # see Unit.reduction
}
_STATE = IS_VERSION | {"replicas": checkpoint.BY_NAME}


def _like(own: Tensor | int) -> checkpoint.Field:
    """The rule for a value, from the one that this run would save now."""
    if not isinstance(own, DTensor):
        return checkpoint.integer(0)
    here = checkpoint.tensor(own.to_local().shape)

    def flaw(value: object) -> object:
        if not isinstance(value, DTensor):
            return type(value).__name__
        if value.shape != own.shape:
            return f"one of {list(value.shape)}"
        return here.flaw(value.to_local())

    rule = f"a DTensor of {list(own.shape)}, its local part {here.rule}"
    return checkpoint.Field(f"{rule} (torch.distributed.checkpoint reshards)", flaw)


def make(replica: int | str, entry: Entry) -> dict[str, Any]:
    """The state dict of one replica's ranks."""
    return {"version": VERSION, "replicas": {str(replica): entry}}


def spread(piece: Piece, segment: SegmentState, packed: int) -> dict[str, Tensor | int]:
    """A parameter's shard as it is saved.

    Args:
        segment: its bucket's state for it.
        packed: how many times it was packed.
    """
    parameter, local = piece.parameter, piece.local
    mesh, rows = parameter.device_mesh, parameter.shape[piece.dim]
    saved: dict[str, Tensor | int] = {"packed": packed}  # the same on all shards
    parts = {RESIDUAL: segment.residual, OWNER_RESIDUAL: segment.owner}
    for key, value in parts.items():
        if value is not None:
            saved[key] = DTensor.from_local(
                value[: local.numel()].view(local),
                mesh,
                [Shard(piece.dim)],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
    number = torch.full((local[piece.dim],), float(mesh.get_local_rank()))
    saved["shard"] = DTensor.from_local(
        number, mesh, [Shard(0)], run_check=False, shape=torch.Size([rows]), stride=(1,)
    )
    return saved


def gather_up(piece: Piece, saved: dict[str, Tensor]) -> SegmentState:
    """The state of a shard, from a saved one."""

    def padded(value: Tensor) -> Tensor:
        local, flat = _local(value).cpu(), torch.zeros(piece.padded)
        flat[: local.numel()] = local.flatten()
        return flat

    return SegmentState(saved[RESIDUAL], saved.get(OWNER_RESIDUAL)).map(padded)


def find(state: object, replica: int, here: Entry, pieces: Sequence[Piece]) -> Entry:
    """This replica's entry, checked; raises for a different replica's, settings or model.

    Args:
        here: the entry that this run would save now.
        pieces: of all parameters of this model.
    """
    op = "load_state_dict"
    replicas = checkpoint.checked(op, state, _STATE)["replicas"]
    saved = replicas.get(str(replica))
    if saved is None:
        got = f"that of replica {', '.join(replicas)}"
        checks.fail(op, "state", f"replica {replica}'s own", got)
    entry = checkpoint.checked(op, saved, _ENTRY)
    if entry["replicas"] != here["replicas"]:
        rule = f"{here['replicas']}, as in this run (load_merged takes any number)"
        checks.fail(op, "replicas", rule, entry["replicas"])
    stored = {
        name
        for name, parts in entry["parameters"].items()
        if isinstance(parts, dict) and OWNER_RESIDUAL in parts
    }
    # torch.distributed.checkpoint is silent of what it finds beside what this run's own state has.
    if entry["transport"] == "reduce_scatter" and entry["parameters"].keys() - stored:
        rule = "owners' residuals (load_merged reads a folder of either transport)"
        checks.fail(op, "state", rule, "one by reduce_scatter without them", verb="have")
    return _require_fit(op, entry, _as_stored(here, stored), pieces)


def _as_stored(here: Entry, owners: Collection[str]) -> Entry:
    """`here`, with owners' residuals for these parameters only, whichever its own transport."""
    parameters = {}
    for name, own in here["parameters"].items():
        parameters[name] = {key: value for key, value in own.items() if key != OWNER_RESIDUAL}
        if name in owners:
            parameters[name][OWNER_RESIDUAL] = torch.zeros_like(own[RESIDUAL])
    return {**here, "parameters": parameters}


def _require_fit(op: str, entry: Entry, here: Entry, pieces: Sequence[Piece]) -> Entry:
    """The entry; raises unless it is sound, and of this run's settings and model."""
    for key in ("density", "reduction"):
        if entry[key] != here[key]:
            checks.fail(op, key, f"{here[key]}, as in this run", entry[key])
    _require_same_names(op, entry["parameters"].keys(), here)
    parameters = {}
    for piece in pieces:
        own = here["parameters"][piece.name]
        table = {key: _like(value) for key, value in own.items()}
        found = checkpoint.checked(op, entry["parameters"][piece.name], table, f" of {piece.name}")
        theirs, ours = _local(found["shard"]), _local(own["shard"])
        if entry["shards"] == here["shards"] and not torch.equal(theirs, ours):
            got = f"that of shard {theirs[0]:.0f}"
            checks.fail(op, "state", f"that of shard {ours[0]:.0f}", got)
        parameters[piece.name] = found
    return {**entry, "parameters": parameters}


def _require_same_names(op: str, names: Set[str], here: Entry) -> None:
    if difference := names ^ here["parameters"].keys():
        got = f"a difference in {', '.join(sorted(difference))}"
        checks.fail(op, "parameters", "those of this model", got)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def read(
    folder: str | os.PathLike[str], key: str, here: Entry, pieces: Sequence[Piece]
) -> Iterator[Entry]:
    """The entries that `torch.distributed.checkpoint` saved, replica by replica, each cut for this
    run. Collective over all ranks of this run.

    Args:
        key: the name the state was saved under; dots go deeper.
        here: the entry that this run would save now; its tensors are overwritten.
        pieces: of all parameters of this model.

    Raises:
        ValueError: there is no such state, a replica's is missing, or it does not fit.
    """
    import torch.distributed.checkpoint as dcp  # late: it takes a second to import

    op = "load_merged"
    prefix = tuple(key.split("."))
    paths = dcp.FileSystemReader(folder).read_metadata().planner_data.values()
    depth = len(prefix)
    of_state = [path for path in paths if path[: depth + 1] == (*prefix, "replicas")]
    found = sorted({path[depth + 1] for path in of_state})
    if not found:
        rule = f"the name of a dct_fully_shard_hook's state in {folder}"
        checks.fail(op, "key", rule, repr(key))
    for replica in found:
        below = [path[depth + 2 :] for path in of_state if path[depth + 1] == replica]
        # Told here, because a load does not notice what is there beside what it looks for.
        _require_same_names(op, {path[1] for path in below if path[0] == "parameters"}, here)
        template = _as_stored(here, {p[1] for p in below if p[-1] == OWNER_RESIDUAL})
        state = make(replica, template)
        tree = state
        for name in reversed(prefix):
            tree = {name: tree}
        try:
            dcp.load(tree, checkpoint_id=folder)
        except dcp.CheckpointException as error:  # a BaseException, on all ranks alike
            why = next(iter(error.failures.values()))[0]
            checks.fail(op, "folder", f"a state that fits this model in {key!r}", why, verb="hold")
        entry = checkpoint.checked(op, state["replicas"][replica], _ENTRY)
        if len(found) != entry["replicas"]:
            rule = f"all {entry['replicas']} replicas"
            checks.fail(op, "folder", rule, f"only {', '.join(found)}", verb="hold")
        yield _require_fit(op, entry, template, pieces)


def mean(segments: Iterable[dict[str, SegmentState]]) -> dict[str, SegmentState]:
    """One state for every replica of a run, from those of all replicas of a different run.

    Residuals are the mean over replicas. A step applies the mean of their messages, so the pending
    updates stay the same for any number of them, to float32 rounding (summed in float64).
    Residuals of owners are in units of the mean, and are added.
    """
    sums: dict[str, Tensor] = {}
    owed: dict[str, Tensor] = {}
    replicas = 0
    for state in segments:
        replicas += 1
        for name, segment in state.items():
            sums[name] = sums.get(name, 0) + segment.residual.double()
            if segment.owner is not None:
                owed[name] = owed.get(name, 0) + segment.owner.double()
    return {
        name: SegmentState((total / replicas + owed.get(name, 0)).float())
        for name, total in sums.items()
    }
