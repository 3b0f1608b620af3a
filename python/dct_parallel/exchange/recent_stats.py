"""Statistics of the last steps."""

import warnings
from collections import deque
from collections.abc import Sequence

from .results import ExchangeResult

RECENT_STEPS = 100

# Thresholds have the error of their samples, so with a quarter of headroom some 10 to 20 % of
# payloads overflow, by little, and different ones in the next step. Beyond half it is the rule.
OVERFLOW_WARNING = 0.5


class RecentStats:
    """Density and overflow of the last 100 steps; warns once if most payloads overflowed."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._warned = False

    def note(self, results: Sequence[ExchangeResult]) -> None:
        """Note a step, from the result of each bucket; nothing if there was no payload in it."""
        payloads = sum(one.payloads for one in results)
        if payloads:
            sent = sum(sum(one.counts) for one in results)
            numel = sum(one.numel for one in results)
            late = sum(one.overflowed for one in results)
            self.add(density=sent / max(numel, 1), overflow=late / payloads)

    def add(self, density: float, overflow: float) -> None:
        """Note a step: the fraction of entries sent, and of payloads without room for all."""
        self._steps.append((density, overflow))
        late = self.overflow or 0.0
        if late > OVERFLOW_WARNING and len(self._steps) == RECENT_STEPS and not self._warned:
            self._warned = True
            warnings.warn(
                f"DCT: {late:.0%} of the payloads of the last {RECENT_STEPS} steps had "
                "no room for all entries above the threshold: the rest is sent in later steps. "
                "Use policy 'fresh', a smaller refresh_every or a higher density.",
                stacklevel=2,
            )

    @property
    def density(self) -> float | None:
        """Mean fraction of entries sent; None before the first step."""
        return sum(d for d, _ in self._steps) / len(self._steps) if self._steps else None

    @property
    def overflow(self) -> float | None:
        """Fraction of payloads with less room than entries that passed; None before the first."""
        return sum(o for _, o in self._steps) / len(self._steps) if self._steps else None
