"""What a message and a collective cost on a link.

The alpha-beta model (Hockney 1994): a message of n bytes takes alpha + n / bandwidth. Collectives
follow Thakur, Rabenseifner and Gropp (2005): a ring, whose steps grow with P, or, where that is
less, recursive doubling or a double tree (Sanders, Speck and Traeff 2009), whose steps grow with
log2 P. On CPUs gloo adds a cost per byte, and its all-gathers do not fill a link.
"""

import math
from typing import NamedTuple

RDMA_FROM = 100e9  # bits per second: links of such a rate are taken to have it


class Link(NamedTuple):
    """alpha: seconds per message; bandwidth: bytes per second in each direction.

    per_byte: seconds of the ranks' own work for each byte; gathered: the part of the bandwidth that
    all-gathers and all-to-alls reach.
    """

    alpha: float
    bandwidth: float
    per_byte: float = 0.0
    gathered: float = 1.0


# Of gloo between 2 ranks on 2 busy cores: they fit the wire times of docs/results/link_few_bits.md
# at both of its rates (tests/bench/test_cost_model.py).
GLOO = Link(1.5e-3, 0.0, 5e-9, 0.7)
TCP, RDMA = Link(50e-6, 0.0), Link(10e-6, 0.0)  # NCCL's; assumed
COSTS = {
    "cpu": "1.5 ms per message and 5 ns per byte, all-gathers at 70 % of the rate: gloo on 2 busy "
    "cores, measured (docs/results/link_few_bits.md)",
    "gpu": "50 us per message below 100 Gbit/s (TCP), 10 us from there (RDMA), assumed",
}


def link_of(device: str, rate: float) -> Link:
    """A node's link of this rate, in bits per second."""
    costs = GLOO if device == "cpu" else RDMA if rate >= RDMA_FROM else TCP
    return costs._replace(bandwidth=rate / 8)


def all_reduce(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds: a ring, or a pipelined double binary tree, whichever is faster."""
    each = 1 / link.bandwidth + link.per_byte
    ring = 2 * (ranks - 1) * (link.alpha + nbytes / ranks * each)
    tree = 2 * _log2(ranks) * link.alpha + 2 * nbytes * each
    return min(ring, tree) if ranks > 1 else 0.0


def all_gather(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds, `nbytes` from each rank: recursive doubling."""
    return _log2(ranks) * link.alpha + (ranks - 1) * nbytes * _gathered(link)


def all_to_all(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds, `nbytes` from each rank to each other: pairwise, or Bruck's algorithm."""
    pairwise = (ranks - 1) * (link.alpha + nbytes * _gathered(link))
    bruck = _log2(ranks) * (link.alpha + ranks / 2 * nbytes * _gathered(link))
    return min(pairwise, bruck)


def _log2(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def _gathered(link: Link) -> float:
    return 1 / (link.gathered * link.bandwidth) + link.per_byte
