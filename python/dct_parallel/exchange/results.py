"""The result of an exchange, as one rank knows it."""

from collections.abc import Sequence
from typing import NamedTuple


class ExchangeResult(NamedTuple):
    """What this rank received, and the entries that were sent."""

    damaged: Sequence[str]  # payloads that this rank could not use, each with its sender
    non_finite: bool  # whether some sender saw a NaN or Inf
    counts: Sequence[int]  # entries that this rank packed, per range
    numel: int  # elements of these ranges
    overflowed: int  # payloads without room for all entries that passed
    payloads: int  # all payloads
