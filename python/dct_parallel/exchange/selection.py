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

# By default payloads go to everybody up to so many ranks, fewer if every entry is sent; beyond that
# in buckets of fewer blocks per rank, whose ranges are too short to repay a second collective.
GATHER_RANKS, GATHER_RANKS_FEW_BITS, LEAST_BLOCKS = 8, 2, 4


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
    few = ranks <= _gather_ranks(settings)
    return "all_gather" if few or numel < _least(ranks) else "reduce_scatter"


def keeps_owners(transport: str | None, settings: Settings, ranks: int) -> bool:
    """Whether buckets may have owners, whose residuals are then part of a state."""
    return transport_for(transport, settings, _least(ranks), ranks) == "reduce_scatter"


def reason(transport: str | None, plans: Sequence[BucketPlan]) -> str:
    """Why these plans have their transports."""
    if transport is not None:
        return "as asked"
    ranks, most = plans[0].ranks, _gather_ranks(plans[0].settings)
    if ranks <= most:
        return f"up to {most} ranks"
    why = f"more than {most} ranks"
    if any(plan.transport == "all_gather" for plan in plans):
        why += f"; all_gather below {_least(ranks):,} elements, {LEAST_BLOCKS} blocks a rank"
    return why


def _gather_ranks(settings: Settings) -> int:
    return GATHER_RANKS_FEW_BITS if settings.few_bits else GATHER_RANKS


def _least(ranks: int) -> int:
    """Elements of the smallest bucket for a reduce-scatter."""
    return LEAST_BLOCKS * ranks * BLOCK
