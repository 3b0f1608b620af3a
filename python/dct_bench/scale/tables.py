"""What embedding tables cost on T ranks: shared by all of them, or by groups with replicas.

Full model parallelism shares the tables among all T ranks. Two-dimensional parallelism
(arXiv 2508.03854) shares them among the L ranks of a group, has T / L replicas of them, and
averages what changed every few steps. Bytes and memory are by the formulas of what `dct_parallel`
does; times by the links' model, which knows neither imbalance nor contention. The dense part of a
model is the same in both and left out.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from .cost_model import Link, all_gather, all_reduce, all_to_all

SYNCS = ("whole", "float32", "float16", "dct")  # what crosses: the table, or rows that changed
_PAYLOAD_ENTRY, _STATE_ENTRY, _HEADROOM = (
    4,
    6,
    1.25,
)  # position and value, as ReplicaSync sends them
_BLOCK = 16384  # elements to which a payload has 4 bytes of their own
_BINS = 4096  # of ranks of rows, in which their probabilities are as good as equal


@dataclasses.dataclass(frozen=True)
class Tables:
    """Tables as one: `lookups` ids a sample, drawn from `rows` rows of `width` float32 entries.

    Attributes:
        exponent: row r is drawn with a probability of about r ** -exponent.
        batch: samples per rank and step.
        sync_every: steps between syncs of replicas.
        density: of a compressed sync.
    """

    rows: float
    width: int
    lookups: int
    exponent: float
    batch: int
    sync_every: int
    density: float

    def touched(self, draws: float) -> float:
        """How many different rows so many lookups meet, on average."""
        edges = np.unique(np.geomspace(1, self.rows + 1, _BINS).round())
        counts = np.diff(edges)
        weight = np.sqrt(edges[:-1] * (edges[1:] - 1)) ** -self.exponent
        chance = weight / (weight * counts).sum()
        return float((counts * -np.expm1(draws * np.log1p(-np.minimum(chance, 1 - 1e-12)))).sum())


class Cost(NamedTuple):
    """Of one rank. rows, ids, sync: bytes it sends in a step, of a sync its share of the steps;
    memory: bytes of weights, accumulators, and what a sync keeps; seconds of a step's exchanges.
    """

    rows: float
    ids: float
    sync: float
    memory: float
    seconds: float


def cost(tables: Tables, ranks: int, group: int, sync: str, link: Link) -> Cost:
    """Of tables on `ranks` ranks in groups of `group`, with a sync of SYNCS.

    With "dct" as if every sync were followed by a flush that costs nothing: rows that wait from
    earlier periods take part as well, so its bytes and memory are lower bounds.
    """
    asked = tables.batch * tables.lookups * (group - 1) / group
    rows, ids = 2 * 4 * tables.width * asked, 4 * asked
    replicas, own = ranks // group, tables.rows / group
    of_replica = tables.batch * tables.lookups * group * tables.sync_every
    changed = tables.touched(of_replica) / group  # rows of a shard, on one replica, and on some
    union = tables.touched(of_replica * replicas) / group
    sent, kept, took = 0.0, 0.0, 0.0
    if replicas > 1:
        sent, kept, took = _sync(tables, replicas, own, changed, union, sync, link)
    pairwise = 2 * all_to_all(link, group, rows / 2 / max(group - 1, 1))
    exchange = pairwise + all_to_all(link, group, ids / max(group - 1, 1))
    return Cost(
        rows,
        ids,
        sent / tables.sync_every,
        4 * own * (tables.width + 1) + kept,
        exchange + took / tables.sync_every,
    )


def _sync(
    tables: Tables,
    replicas: int,
    own: float,
    changed: float,
    union: float,
    sync: str,
    link: Link,
) -> tuple[float, float, float]:
    """(bytes, memory, seconds) of one sync."""
    width = tables.width
    if sync == "whole":
        reduced, gathered, kept = 4 * own * (width + 1), 0.0, 4 * own * (width + 1)
    elif sync == "dct":
        entries = union * width
        reduced = 0.0
        gathered = 4 * changed + _STATE_ENTRY * changed + 4 * entries / _BLOCK
        gathered += _HEADROOM * tables.density * entries * _PAYLOAD_ENTRY
        # Marks, rows and what they held, and what waits, with its rows.
        kept = own + 4 * changed * (width + 2) + 4 * union * (width + 1)
    else:
        bytes_of = {"float32": 4, "float16": 2}[sync]
        reduced, gathered = union * (bytes_of * width + 4), 4 * changed
        kept = own + 4 * changed + (4 * changed * width if sync == "float16" else 0.0)
    sent = 2 * (replicas - 1) / replicas * reduced + (replicas - 1) * gathered
    took = all_reduce(link, replicas, reduced) if reduced else 0.0
    took += all_gather(link, replicas, gathered) if gathered else 0.0
    return sent, kept, took
