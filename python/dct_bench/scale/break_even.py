"""At which rates one method is faster than another."""

import itertools
from collections.abc import Callable, Collection, Sequence

from .cost_model import DENSE, METHODS, OURS, Cluster, Model

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


def faster_by(
    model: Model,
    cluster: Callable[[int, float], Cluster],
    ranks: Sequence[int],
    known: Collection[str] = METHODS,
) -> dict[str, dict[tuple[int, float], float]]:
    """{opponent: {(ranks, rate): how many times as fast the best way of DCT is}}.

    Args:
        cluster: of ranks and a rate.
        known: methods whose bytes are known; without PowerSGD it is no opponent.
    """
    opponents = {
        "the better of dense and bf16": DENSE,
        "PowerSGD, rank 1": ("powersgd1",),
    }

    def best(methods: Sequence[str], at: Cluster) -> float:
        return min(model.step(method, at).seconds for method in methods)

    clusters = {(p, rate): cluster(p, rate) for p in ranks for rate in GRID[50:251:5]}
    return {
        opponent: {key: best(methods, at) / best(OURS, at) for key, at in clusters.items()}
        for opponent, methods in opponents.items()
        if set(methods) <= set(known)
    }
