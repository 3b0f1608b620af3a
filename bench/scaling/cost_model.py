"""What a training step costs with P ranks: arithmetic on shapes, links and kernel rates.

A step is compute + pack + wire + unpack. Nothing contends and nobody straggles: predictions are
lower bounds.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from dct_parallel.exchange.codec import Settings
from dct_parallel.exchange.plan import BucketPlan
from dct_parallel.exchange.selection import transport_for

from .links import Link, all_gather, all_reduce, all_to_all
from .methods import LOCAL, LOCAL_PERIOD, METHODS
from .shapes import Shape

# Passes over float32 gradients that PowerSGD with error feedback makes, by its formulas: add the
# error (3), M Q (1), M^T P (1), P Q^T (1), the new error (3); its rank-r factors are small.
POWERSGD_PASSES = 9
PACK_BYTES = 12  # per element with grad: residual read and written, grad read
OWNER_BYTES = 8  # per element of a sum that is packed again: its residual read and written
# Of local steps, beside what the ops move, at a copy's speed. Packing: weights less the base;
# unpacking: the mean is added to the base (12), and that is copied to the weights (8).
LOCAL_PACK_BYTES, LOCAL_UNPACK_BYTES = 12, 20


class Kernels(NamedTuple):
    """Bytes per second that kernels move, and where the figures are from.

    quantize: of quantize_pack; dequantize: of dequantize_sum, and of dequantize_sum_pack.
    """

    copy: float
    mask_pack: float
    scatter_unpack: float
    quantize: float
    dequantize: float
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

    def step(self, name: str, cluster: Cluster) -> Step:
        """One step of a method in METHODS."""
        if name == LOCAL:
            return self._local(cluster)
        if METHODS[name].settings is None:
            pack, wire, unpack, sent = getattr(self, f"_{name}")(cluster)
        else:
            pack, wire, unpack, sent = self._hook(self.plan(name, cluster.nodes), cluster)
        inside = all_reduce(cluster.inside, cluster.gpus_per_node, 4 * self.numel)
        exposed = max(0.0, wire - cluster.overlap * self.compute)
        return Step(self.compute, pack, inside + exposed, unpack, sent)

    @cached_property
    def numel(self) -> int:
        return sum(self._sizes)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    def plan(self, name: str, ranks: int) -> BucketPlan:
        """As the training layer would send it; the formulas of its bytes are the layer's own."""
        key = name, ranks
        if key not in self._plans:
            method, settings = METHODS[name], self.settings(name)
            transport = transport_for(method.transport, settings, self.numel, ranks)
            names = tuple(str(number) for number in range(len(self.shapes)))
            self._plans[key] = BucketPlan(names, self._sizes, settings, transport, ranks)
        return self._plans[key]

    def settings(self, name: str) -> Settings:
        """Of a method of the training layer."""
        known = METHODS[name].settings
        return dataclasses.replace(known, density=known.density or self.density)

    def default_transport(self, ranks: int) -> str:
        """What the sparse hook takes between so many ranks."""
        return transport_for(None, self.settings("dct"), self.numel, ranks)

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

    def _hook(self, plan: BucketPlan, cluster: Cluster) -> tuple[float, float, float, float]:
        packed, unpacked = self._moved(plan)
        if plan.settings.every_entry:
            pack, unpack = packed / self.kernels.quantize, unpacked / self.kernels.dequantize
        else:
            pack, unpack = packed / self.kernels.mask_pack, unpacked / self.kernels.scatter_unpack
        wire = all_gather(cluster.between, plan.ranks, plan.payload_bytes)
        if plan.transport == "reduce_scatter":
            each_owner = plan.payload_bytes * plan.owners / plan.ranks
            wire += all_to_all(cluster.between, plan.ranks, each_owner)
        return pack, wire, unpack, plan.wire_bytes

    def _moved(self, plan: BucketPlan) -> tuple[float, float]:
        """Bytes that packing and unpacking a bucket move on each rank."""
        ranks, payload, every = plan.ranks, plan.payload_bytes, plan.settings.every_entry
        # A payload of few entries is small beside what it is packed from.
        packed = PACK_BYTES * self.numel + every * plan.owners * payload
        if plan.transport == "all_gather":
            return packed, 4 * self.numel + ranks * payload
        owned = self.numel / plan.owners
        if every:  # the owner sums its range and packs it again, in one pass; then all is unpacked
            summed = (ranks + 1) * payload + OWNER_BYTES * owned
            return packed, summed + 4 * self.numel + plan.owners * payload
        return packed + PACK_BYTES * owned, 4 * (owned + self.numel) + 2 * ranks * payload

    def _local(self, cluster: Cluster) -> Step:
        """All ranks average their weights, with no regard to nodes, once a period."""
        gpus = cluster.gpus_per_node
        ranks = cluster.nodes * gpus
        plan = self.plan(LOCAL, ranks)
        payload = plan.payload_bytes
        # Those of other nodes come in by the node's link, then to each rank as its own node's do.
        sent = (ranks - gpus) * payload
        wire = all_gather(cluster.between, ranks, sent / (ranks - 1))
        if gpus > 1:
            wire += all_gather(cluster.inside._replace(alpha=0.0), ranks, payload)
        if plan.transport == "reduce_scatter":
            # Before that, each rank's ranges go to their owners, all by the node's link.
            each_owner = payload * plan.owners / ranks
            link = cluster.between._replace(bandwidth=cluster.between.bandwidth / gpus)
            wire += all_to_all(link, ranks, each_owner)
            sent += gpus * (ranks - gpus) * each_owner
        packed, unpacked = self._moved(plan)
        kernels, numel = self.kernels, self.numel
        pack = LOCAL_PACK_BYTES * numel / kernels.copy + packed / kernels.quantize
        unpack = LOCAL_UNPACK_BYTES * numel / kernels.copy + unpacked / kernels.dequantize
        # It follows the optimizer's step: nothing is left for it to hide behind.
        each = (pack, wire, unpack, sent)
        return Step(self.compute, *(of / LOCAL_PERIOD for of in each))

    @staticmethod
    def _reduced(cluster: Cluster, nbytes: float) -> float:
        return all_reduce(cluster.between, cluster.nodes, nbytes) if nbytes else 0.0


def _ring_bytes(nbytes: float, ranks: int) -> float:
    return 2 * (ranks - 1) * nbytes / ranks
