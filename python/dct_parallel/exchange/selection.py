"""The transport of a bucket: the one that was asked for, or by ranks and size."""

from collections.abc import Sequence

from dct_kernels import checks
from dct_kernels.layout import BLOCK

from .all_gather import AllGather
from .codec import Settings
from .plan import BucketPlan
from .reduce_scatter import ReduceScatter
from .transport import Transport

TRANSPORTS: dict[str, type[Transport]]
TRANSPORTS = {"all_gather": AllGather, "reduce_scatter": ReduceScatter}

# By default the largest entries go to everybody up to so many ranks, and beyond that in buckets of
# fewer blocks per rank, whose ranges are too short to repay a second collective. Where every entry
# is sent, bytes decide.
GATHER_RANKS, LEAST_BLOCKS = 8, 4


def require_transport(op: str, transport: str | None) -> None:
    """Raise unless this is the name of a transport, or None."""
    # A list, because it also compares values that cannot be hashed.
    if transport is not None and transport not in list(TRANSPORTS):
        rule = f"None, {' or '.join(map(repr, TRANSPORTS))}"
        checks.fail(op, "transport", rule, repr(transport))


def transport_for(transport: str | None, settings: Settings, numel: int, ranks: int) -> str:
    """The transport of a bucket of so many elements between so many ranks."""
    if transport is not None:
        return transport
    if settings.every_entry:
        plans = [BucketPlan(("",), (numel,), settings, name, ranks) for name in TRANSPORTS]
        return min(plans, key=lambda plan: plan.wire_bytes).transport  # the first of equal ones
    few = ranks <= GATHER_RANKS or numel < _least(ranks)
    return "all_gather" if few else "reduce_scatter"


def keeps_owners(transport: str | None, settings: Settings, ranks: int) -> bool:
    """Whether buckets may have owners, whose residuals are then part of a state."""
    return transport_for(transport, settings, _least(ranks), ranks) == "reduce_scatter"


def reason(transport: str | None, plans: Sequence[BucketPlan]) -> str:
    """Why these plans have their transports."""
    if transport is not None:
        return "as asked"
    if plans[0].settings.every_entry:
        return "fewer bytes"
    ranks = plans[0].ranks
    if ranks <= GATHER_RANKS:
        return f"up to {GATHER_RANKS} ranks"
    why = f"more than {GATHER_RANKS} ranks"
    if any(plan.transport == "all_gather" for plan in plans):
        why += f"; all_gather below {_least(ranks):,} elements, {LEAST_BLOCKS} blocks a rank"
    return why


def _least(ranks: int) -> int:
    """Elements of the smallest bucket for a reduce-scatter."""
    return LEAST_BLOCKS * ranks * BLOCK
