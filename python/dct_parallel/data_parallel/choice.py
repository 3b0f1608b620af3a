"""Which transport a user's word stands for."""

from dct_kernels import checks

from .gather import Gather
from .shard import Shard
from .transports import Transport

TRANSPORTS: dict[str, type[Transport]] = {Gather.name: Gather, Shard.name: Shard}
AUTO = "auto"


def resolve_transport(transport: str) -> tuple[type[Transport], str]:
    """The class behind a transport's name, and why it is that."""
    if transport == AUTO:
        return Gather, "auto: no link is known"
    if transport not in TRANSPORTS:
        rule = " or ".join(map(repr, (AUTO, *TRANSPORTS)))
        checks.fail("DCTState", "transport", rule, repr(transport))
    return TRANSPORTS[transport], "as asked"
