"""At which rates one method is faster than another."""

import itertools
from collections.abc import Callable

from .cost_model import Cluster, Model

FASTER = 1.05  # times as fast: with less than that two methods are called as fast as each other
GRID = [10 ** (7 + step / 50) for step in range(6 * 50 + 1)]  # 10 Mbit/s to 10 Tbit/s


def paying_rates(
    model: Model, cluster: Callable[[float], Cluster], ours: str, theirs: str
) -> list[tuple[float, float]]:
    """Ranges of rates (bits per second) in which `ours` is faster, as far as GRID tells.

    A method that sends less but computes more pays up to a rate; one that sends more but computes
    less, or has fewer messages, pays from a rate on.

    Args:
        cluster: of a rate.
    """

    def pays(rate: float) -> bool:
        at = cluster(rate)
        return FASTER * model.step(ours, at).seconds <= model.step(theirs, at).seconds

    groups = [(paying, list(rates)) for paying, rates in itertools.groupby(GRID, key=pays)]
    return [(rates[0], rates[-1]) for paying, rates in groups if paying]
