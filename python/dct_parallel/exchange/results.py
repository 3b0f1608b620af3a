"""The result of an exchange, as one rank knows it."""

from collections.abc import Sequence
from typing import NamedTuple


class Verdict(NamedTuple):
    """Whether the received payloads can be used."""

    damaged: Sequence[str] = ()  # payloads that this rank received and could not use
    told: Sequence[int] = ()  # ranks that say they received damage, now or in the exchange before
    non_finite: bool = False  # whether some rank saw a NaN or Inf in its gradient: same on all


class Traffic(NamedTuple):
    """The entries that were sent."""

    counts: Sequence[int]  # entries that this rank packed, per range
    numel: int  # elements of these ranges
    overflowed: int  # payloads without room for all entries that passed
    payloads: int  # all payloads


class ExchangeResult(NamedTuple):
    verdict: Verdict
    traffic: Traffic


def join(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict from all of them."""
    return Verdict(
        damaged=[damage for verdict in verdicts for damage in verdict.damaged],
        told=sorted({rank for verdict in verdicts for rank in verdict.told}),
        non_finite=any(verdict.non_finite for verdict in verdicts),
    )
