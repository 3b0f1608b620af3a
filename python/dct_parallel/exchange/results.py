"""What a rank knows of an exchange that is over."""

from collections.abc import Sequence
from typing import NamedTuple


class Verdict(NamedTuple):
    """Whether what was received can be used."""

    damaged: Sequence[str] = ()  # what this rank received and could not use
    told: Sequence[int] = ()  # ranks that say they received damage, now or in the exchange before
    non_finite: bool = False  # whether some rank saw a NaN or Inf in its gradient: alike on all


class Traffic(NamedTuple):
    """What was sent."""

    counts: Sequence[int]  # entries that this rank packed, of each range
    numel: int  # of which they are
    overflowed: int  # how many payloads had no room for all that passed,
    payloads: int  # of how many


class ExchangeResult(NamedTuple):
    verdict: Verdict
    traffic: Traffic


def join(verdicts: Sequence[Verdict]) -> Verdict:
    """What all of them say."""
    return Verdict(
        damaged=[damage for verdict in verdicts for damage in verdict.damaged],
        told=sorted({rank for verdict in verdicts for rank in verdict.told}),
        non_finite=any(verdict.non_finite for verdict in verdicts),
    )
