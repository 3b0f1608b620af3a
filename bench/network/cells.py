"""Merges the measurements of all ranks and rounds into one cell of bench.link."""

import numpy as np


def merge(
    ranks: int,
    rate: float | None,
    mode: str,
    rounds: list[list[dict]],
    shared: int,
) -> dict:
    """A cell from what all ranks measured in every round. Figures are per step.

    "step_ms" has the 20 % quantile, the median and the 80 % quantile; a step takes as long as its
    slowest rank. "payload_bytes" are what a rank hands to collectives. "wire_bytes" and "packets"
    have left a rank's interface.

    Args:
        rate: bits per second, None if it is unlimited.
        shared: the number of ranks that share an interface and its counters.
    """
    times = np.concatenate([np.max([rank["seconds"] for rank in r], axis=0) for r in rounds])
    low, median, high = (float(1e3 * q) for q in np.quantile(times, (0.2, 0.5, 0.8)))

    def per_step(key: str) -> float:
        return float(sum(np.mean([rank[key] for rank in r]) for r in rounds) / len(times))

    return {
        "ranks": ranks,
        "rate": rate,
        "mode": mode,
        "steps": len(times),
        "step_ms": (low, median, high),
        "payload_bytes": per_step("payload_bytes"),
        "wire_bytes": per_step("wire_bytes") / shared,
        "packets": per_step("packets") / shared,
    }
