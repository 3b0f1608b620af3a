"""Checks and merges the states of `DynamicFeatureRows`."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dct_kernels import checks

NAMES = ("owner", "ids", "weight")  # in every state
MERGED = -1  # the rank in a merged state


def require_state(op: str, arg: str, state: Mapping[str, Tensor]) -> None:
    """Raise unless `state` holds tensors, including an owner, ids and a weight."""
    checks.require_type(op, arg, state, Mapping, "a DynamicFeatureRows.state_dict()")
    missing = [name for name in NAMES if name not in state]
    if missing:
        rule = "a DynamicFeatureRows.state_dict(), with no prefix to its names"
        checks.fail(op, arg, rule, f"one without {', '.join(missing)}")
    for name, tensor in state.items():
        checks.require_plain(op, f"{arg}[{name!r}]", tensor)
    owner, ids = state["owner"], state["ids"]
    if owner.shape != (2,):
        checks.fail(op, f"{arg}['owner']", "[rank, ranks]", f"shape {tuple(owner.shape)}")
    checks.require_dtype(op, f"{arg}['owner']", owner.dtype, (torch.int64,))
    if ids.dtype != torch.int64 or ids.dim() != 1:
        checks.fail(op, f"{arg}['ids']", "torch.int64 [n]", f"{ids.dtype} {tuple(ids.shape)}")


def merge_feature_rows(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the states of all ranks into one that any number of ranks can load.

    This call needs no process group and does not mutate the states.

    Args:
        states: `DynamicFeatureRows.state_dict()` of every rank, in any order.

    Returns:
        A state with all rows, in the order of `states`, for `load_state_dict` on every rank.

    Raises:
        ValueError, TypeError: the state of a rank is missing, duplicated or invalid.
    """
    op = "merge_feature_rows"
    checks.require_type(op, "states", states, Sequence, "a sequence of states")
    for index, state in enumerate(states):
        require_state(op, f"states[{index}]", state)
    owners = sorted(tuple(state["owner"].tolist()) for state in states)
    ranks = owners[0][1] if owners else 0
    if not owners or owners != [(rank, ranks) for rank in range(ranks)]:
        got = ", ".join(f"{rank} of {size}" for rank, size in owners) or "none"
        checks.fail(op, "states", "one state of every rank", got, verb="hold")
    if any(state.keys() != states[0].keys() for state in states):
        got = ", ".join(sorted({name for state in states for name in state}))
        checks.fail(op, "states", "the same names", got, verb="have")
    merged = {"owner": torch.tensor([MERGED, ranks], dtype=torch.int64, device="cpu")}
    for name, first in states[0].items():
        if name == "owner":
            continue
        for index, state in enumerate(states):
            tensor, shape = state[name], (len(state["ids"]), *first.shape[1:])
            if (tensor.shape, tensor.dtype) != (shape, first.dtype):
                arg, got = f"states[{index}][{name!r}]", f"{tensor.dtype} {tuple(tensor.shape)}"
                checks.fail(op, arg, f"{first.dtype} {shape}", got)
        merged[name] = torch.cat([state[name].detach() for state in states])
    return merged
