"""What a training step costs with P ranks: arithmetic on shapes, links and kernel rates.

A step is compute + pack + wire + unpack. Links follow the alpha-beta model (Hockney 1994): a
message of n bytes takes alpha + n / bandwidth. Collectives follow Thakur, Rabenseifner and Gropp
(2005): a ring, whose steps grow with P, or, where that is less, recursive doubling or a double tree
(Sanders, Speck and Traeff 2009), whose steps grow with log2 P. Nothing contends and nobody
straggles: predictions are lower bounds.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from dct_parallel.exchange.codec import Settings
from dct_parallel.exchange.plan import BucketPlan
from dct_parallel.exchange.selection import transport_for

from .shapes import Shape

DENSE = ("dense", "bf16")
OURS = ("dct", "dct-reduce-scatter", "local")
METHODS = (*DENSE, "powersgd1", "powersgd2", *OURS)
# Passes over float32 gradients that PowerSGD with error feedback makes, by its formulas: add the
# error (3), M Q (1), M^T P (1), P Q^T (1), the new error (3); its rank-r factors are small.
POWERSGD_PASSES = 9
MASK_PACK_BYTES = 12  # per element with grad: residual read and written, grad read
# DCTAverager as it is by default: every entry in few bits, every few steps. Tensor operations move
# these bytes per element, at a copy's speed. Packing: the residual copied (8), what the weights
# moved by added to it (12), rows read (4), written again from their codes (4) and subtracted (12),
# their least and largest (8), and what is left kept (12). Unpacking: zeros (4) and their mean (8);
# for each rank its rows (4), added (12). Beside packing weights are copied side by side (8) and the
# base subtracted (12), beside unpacking the mean added to the base (12) and that copied (8).
LOCAL_PERIOD, LOCAL_FORMAT = 10, "ternary"
LOCAL_PACK_BYTES, LOCAL_UNPACK_BYTES, LOCAL_RANK_BYTES, LOCAL_WEIGHT_BYTES = 60, 12, 16, 20


class Link(NamedTuple):
    """alpha: seconds per message; bandwidth: bytes per second in each direction."""

    alpha: float
    bandwidth: float


class Kernels(NamedTuple):
    """Bytes per second that kernels move, and where the figures are from."""

    copy: float
    mask_pack: float
    scatter_unpack: float
    source: str


class Step(NamedTuple):
    """Seconds; wire_bytes: what a rank sends between nodes. Of local steps the mean of a period."""

    compute: float
    pack: float
    wire: float
    unpack: float
    wire_bytes: float

    @property
    def seconds(self) -> float:
        return self.compute + self.pack + self.wire + self.unpack


@dataclasses.dataclass(frozen=True)
class Cluster:
    """P = nodes * gpus_per_node ranks.

    Inside a node gradients are averaged densely in float32 before, and the result is passed on
    after: one rank per node takes part in the exchange between nodes.

    Attributes:
        between, inside: the links; `between` is one per node.
        overlap: fraction of `compute` behind which the wire between nodes can hide.
    """

    nodes: int
    gpus_per_node: int
    between: Link
    inside: Link
    overlap: float = 0.0


def all_reduce(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds: a ring, or a pipelined double binary tree, whichever is faster."""
    ring = 2 * (ranks - 1) * (link.alpha + nbytes / ranks / link.bandwidth)
    tree = 2 * _log2(ranks) * link.alpha + 2 * nbytes / link.bandwidth
    return min(ring, tree) if ranks > 1 else 0.0


def all_gather(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds, `nbytes` from each rank: recursive doubling."""
    return _log2(ranks) * link.alpha + (ranks - 1) * nbytes / link.bandwidth


def all_to_all(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds, `nbytes` from each rank to each other: pairwise, or Bruck's algorithm."""
    pairwise = (ranks - 1) * (link.alpha + nbytes / link.bandwidth)
    bruck = _log2(ranks) * (link.alpha + ranks / 2 * nbytes / link.bandwidth)
    return min(pairwise, bruck)


def union_density(density: float, ranks: int) -> float:
    """Of the sum of `ranks` tensors, each of this density, their masks independent.

    Gradients of one batch agree on what is large, so a real union is smaller; at most it is
    ranks * density, where no two masks overlap.
    """
    return 1 - (1 - density) ** ranks


class Model:
    """A model's gradients, and what each method makes of them.

    Args:
        shapes: of its parameters; one bucket.
        compute: seconds of a step outside the exchange.
        density: of DCT's hook, with bfloat16 values.
    """

    def __init__(
        self, shapes: Sequence[Shape], compute: float, kernels: Kernels, density: float
    ) -> None:
        self.shapes = tuple(shapes)
        self.compute = compute
        self.kernels = kernels
        self.density = density
        self._plans: dict[tuple[str, int], BucketPlan] = {}

    def step(self, method: str, cluster: Cluster) -> Step:
        """One step of a method in METHODS."""
        if method == "local":
            return self._local(cluster)
        pack, wire, unpack, sent = getattr(self, f"_{method.replace('-', '_')}")(cluster)
        inside = all_reduce(cluster.inside, cluster.gpus_per_node, 4 * self.numel)
        exposed = max(0.0, wire - cluster.overlap * self.compute)
        return Step(self.compute, pack, inside + exposed, unpack, sent)

    @cached_property
    def numel(self) -> int:
        return sum(self._sizes)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    def plan(self, transport: str, ranks: int) -> BucketPlan:
        """As the training layer would send it; the formulas of its bytes are the layer's own."""
        key = transport, ranks
        if key not in self._plans:
            settings = Settings(self.density, "bfloat16")
            names = tuple(str(number) for number in range(len(self.shapes)))
            self._plans[key] = BucketPlan(names, self._sizes, settings, transport, ranks)
        return self._plans[key]

    def powersgd_bytes(self, rank: int) -> tuple[int, int, int]:
        """(P factors, Q factors, what goes dense): torch's hook, min_compression_rate 2."""
        p = q = dense = 0
        for shape in self.shapes:
            rows, numel = shape[0], math.prod(shape)
            columns = numel // rows
            r = min(rows, columns, rank)
            if len(shape) > 1 and 2 * (rows + columns) * r < numel:
                p, q = p + 4 * rows * r, q + 4 * columns * r
            else:
                dense += 4 * numel
        return p, q, dense

    # Each: (pack seconds, wire seconds, unpack seconds, bytes sent) between nodes.

    def _dense(self, cluster: Cluster) -> tuple[float, float, float, float]:
        nbytes = 4 * self.numel
        divided = 2 * nbytes / self.kernels.copy
        return divided, self._reduced(cluster, nbytes), 0.0, _ring_bytes(nbytes, cluster.nodes)

    def _bf16(self, cluster: Cluster) -> tuple[float, float, float, float]:
        nbytes = 2 * self.numel
        cast = 6 * self.numel / self.kernels.copy
        return cast, self._reduced(cluster, nbytes), cast, _ring_bytes(nbytes, cluster.nodes)

    def _powersgd1(self, cluster: Cluster) -> tuple[float, float, float, float]:
        return self._powersgd(cluster, 1)

    def _powersgd2(self, cluster: Cluster) -> tuple[float, float, float, float]:
        return self._powersgd(cluster, 2)

    def _powersgd(self, cluster: Cluster, rank: int) -> tuple[float, float, float, float]:
        messages = self.powersgd_bytes(rank)
        wire = sum(self._reduced(cluster, nbytes) for nbytes in messages)
        passes = 4 * self.numel * POWERSGD_PASSES / self.kernels.copy
        return passes / 2, wire, passes / 2, _ring_bytes(sum(messages), cluster.nodes)

    def _dct(self, cluster: Cluster) -> tuple[float, float, float, float]:
        nodes, plan = cluster.nodes, self.plan("all_gather", cluster.nodes)
        wire = all_gather(cluster.between, nodes, plan.payload_bytes)
        unpacked = 4 * self.numel + nodes * plan.payload_bytes
        return (
            MASK_PACK_BYTES * self.numel / self.kernels.mask_pack,
            wire,
            unpacked / self.kernels.scatter_unpack,
            plan.wire_bytes,
        )

    def _dct_reduce_scatter(self, cluster: Cluster) -> tuple[float, float, float, float]:
        nodes, plan = cluster.nodes, self.plan("reduce_scatter", cluster.nodes)
        payload = plan.payload_bytes
        wire = all_to_all(cluster.between, nodes, payload * plan.owners / nodes)
        wire += all_gather(cluster.between, nodes, payload)
        owned = self.numel / plan.owners
        # The owner sums its range and packs it again; then everybody unpacks all ranges.
        unpacked = 4 * owned + 4 * self.numel + 2 * nodes * payload
        packed = MASK_PACK_BYTES * (self.numel + owned)
        return (
            packed / self.kernels.mask_pack,
            wire,
            unpacked / self.kernels.scatter_unpack,
            plan.wire_bytes,
        )

    def _local(self, cluster: Cluster) -> Step:
        """All ranks average their weights, with no regard to nodes, once a period."""
        gpus = cluster.gpus_per_node
        ranks = cluster.nodes * gpus
        settings = Settings(1.0, LOCAL_FORMAT)
        transport = transport_for(None, settings, self.numel, ranks)
        plan = BucketPlan(("weights",), (self.numel,), settings, transport, ranks)
        payload = plan.payload_bytes
        # Those of other nodes come in by the node's link, then to each rank as its own node's do.
        sent = (ranks - gpus) * payload
        wire = _log2(ranks) * cluster.between.alpha + sent / cluster.between.bandwidth
        if gpus > 1:
            wire += (ranks - 1) * payload / cluster.inside.bandwidth
        packed, unpacked = self.numel, [(ranks, self.numel)]  # elements; of so many ranks
        if transport == "reduce_scatter":
            # Before that, each rank's ranges go to their owners, all by the node's link; an owner
            # sums its range and packs it again.
            each_owner = payload * plan.owners / ranks
            link = cluster.between._replace(bandwidth=cluster.between.bandwidth / gpus)
            wire += all_to_all(link, ranks, each_owner)
            sent += gpus * (ranks - gpus) * each_owner
            owned = self.numel // plan.owners
            packed, unpacked = self.numel + owned, [(ranks, owned), (1, self.numel)]
        beside = LOCAL_WEIGHT_BYTES * self.numel
        pack = (LOCAL_PACK_BYTES * packed + beside) / self.kernels.copy
        summed = sum((LOCAL_UNPACK_BYTES + LOCAL_RANK_BYTES * of) * n for of, n in unpacked)
        unpack = (summed + beside) / self.kernels.copy
        # It follows the optimizer's step: nothing is left for it to hide behind.
        each = (pack, wire, unpack, sent)
        return Step(self.compute, *(of / LOCAL_PERIOD for of in each))

    @staticmethod
    def _reduced(cluster: Cluster, nbytes: float) -> float:
        return all_reduce(cluster.between, cluster.nodes, nbytes) if nbytes else 0.0


def _ring_bytes(nbytes: float, ranks: int) -> float:
    return 2 * (ranks - 1) * nbytes / ranks


def _log2(ranks: int) -> int:
    return math.ceil(math.log2(ranks))
