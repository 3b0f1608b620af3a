"""Predicts the time of a training step on P ranks: compute + pack + wire + unpack.

A message of n bytes takes alpha + n / bandwidth seconds (Hockney 1994), plus CPU time per byte. The
algorithms of collectives are from Thakur, Rabenseifner and Gropp (2005). Predictions are lower
bounds, because the model assumes that messages do not block each other, no rank is slow, and ranks
do not share cores.
"""

import dataclasses
import math
from typing import NamedTuple

from dct_parallel.exchange.plan import BucketPlan, transport_for
from dct_parallel.exchange.settings import Settings


class Link(NamedTuple):
    """A link between ranks.

    Attributes:
        alpha: seconds per message.
        bandwidth: bytes per second in each direction.
        per_byte: seconds of CPU work per byte.
        gathered: the fraction of the bandwidth that all-gather and all-to-all achieve.
    """

    alpha: float
    bandwidth: float = math.inf
    per_byte: float = 0.0
    gathered: float = 1.0


class Kernels(NamedTuple):
    """Speeds of a copy and of the ops, in bytes per second.

    `host` is the number of seconds that a hook takes on the host for each bucket.
    """

    copy: float
    mask_pack: float
    scatter_unpack: float
    quantize: float
    dequantize: float
    host: float = 0.0


RDMA_FROM = 100e9  # bits per second; links with at least this rate are assumed to use RDMA
TCP, RDMA = Link(50e-6), Link(10e-6)  # assumed values for NCCL
# Measured. GLOO and CPU: 2 ranks on 2 busy cores (docs/results/link.md). H200: 2^28 elements
# (docs/results/kernels_h200.md). Host times: medians of hooks, on an idle CPU (kernels_cpu.md), and
# with an H200 at commit ea3d3f0 (the time that a hook adds to a step, minus the kernels).
GLOO = Link(1.5e-3, per_byte=5e-10, gathered=0.7)
CPU = Kernels(1.108e10, 9.773e9, 6.928e9, 1.094e10, 6.436e9, host=1e-4)
H200 = Kernels(4.280e12, 3.534e12, 3.754e12, 3.953e12, 4.020e12, host=4.3e-4)
SOURCES = {
    "cpu": "gloo and the cpp backend, measured on 2 busy cores of an AMD EPYC",
    "gpu": "the cuda backend, measured on an NVIDIA H200; the latency of NCCL is assumed",
}


def link_of(device: str, rate: float) -> Link:
    """The link of a device ("cpu" or "gpu") with a rate in bits per second."""
    costs = GLOO if device == "cpu" else RDMA if rate >= RDMA_FROM else TCP
    return costs._replace(bandwidth=rate / 8)


def all_reduce(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds of an all-reduce, by a ring or a double binary tree (Sanders, Speck, Traeff 2009)."""
    each = 1 / link.bandwidth + link.per_byte
    ring = 2 * (ranks - 1) * (link.alpha + nbytes / ranks * each)
    tree = 2 * _log2(ranks) * link.alpha + 2 * nbytes * each
    return min(ring, tree)


def all_gather(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds of an all-gather by recursive doubling, with `nbytes` from each rank."""
    return _log2(ranks) * link.alpha + (ranks - 1) * nbytes * _gathered(link)


def all_to_all(link: Link, ranks: int, nbytes: float) -> float:
    """Seconds of an all-to-all of `nbytes` per pair of ranks, pairwise or by Bruck's algorithm."""
    pairwise = (ranks - 1) * (link.alpha + nbytes * _gathered(link))
    bruck = _log2(ranks) * (link.alpha + ranks / 2 * nbytes * _gathered(link))
    return min(pairwise, bruck)


def _log2(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def _gathered(link: Link) -> float:
    return 1 / (link.gathered * link.bandwidth) + link.per_byte


BUCKET_BYTES = 25 * 2**20  # of float32 gradients, the default of DDP
LARGEST = 2**31  # elements of a planned bucket; a payload must have fewer than 2^32 entries
PERIOD = 10  # the default period of DCTAverager
PACK_BYTES = 12  # per element: read and write the residual, read the gradient
# Bytes per element that local steps move at a copy's speed. Before the exchange: subtract the base
# from the weights (12). After it: add the mean to the base (12), copy the base to the weights (8).
LOCAL_PACK_BYTES, LOCAL_UNPACK_BYTES = 12, 20


def buckets(numel: int) -> int:
    """The number of DDP's buckets of float32 gradients."""
    return math.ceil(4 * numel / BUCKET_BYTES)


class Method(NamedTuple):
    """A method that averages gradients or weights.

    Attributes:
        call: the call in the guide; DENSITY stands for the value of --density.
        settings: settings of DCT, or None for a dense all-reduce. Density 0 stands for --density.
        optimizer: the only optimizer for which the guide recommends the method, or None.
        ranks: the largest number of ranks for which the guide recommends the method.
        loss: the loss minus the loss of float32, as in the guide.
        measured_on: the model of `loss`.
        period: the number of local steps between exchanges, or 1.
    """

    call: str
    settings: Settings | None = None
    optimizer: str | None = None
    ranks: float = math.inf
    loss: str = ""
    measured_on: str = "a transformer with 0.35 million parameters"
    period: int = 1


# The first of equally fast methods is recommended, so simpler and more exact methods come first.
METHODS = {
    "dense": Method("float32 DDP"),
    "bf16": Method("DDP with bf16_compress_hook"),
    "dct": Method(
        "DCTState(ddp, density=DENSITY)",
        Settings(0.0, "bfloat16"),
        "sgd",
        loss="-0.0001 ± 0.0004 in log loss at density 0.005 on 2 ranks",
        measured_on="a click model with 1.4 million parameters",
    ),
    "int4": Method(
        'DCTState(ddp, format="int4")',
        Settings(1.0, "int4"),
        "adamw",
        loss="-0.0006 ± 0.0012 on 2 ranks and -0.0000 ± 0.0003 on 4, after 3,000 steps",
    ),
    "local": Method(
        f"DCTAverager(model, period={PERIOD})",
        Settings(1.0, "ternary"),
        "adamw",
        ranks=2,
        loss="+0.0146 ± 0.0036 after 3,000 steps, and more in shorter runs",
        period=PERIOD,
    ),
}
DENSE_BYTES = {"dense": 4, "bf16": 2}  # per element
# Bytes per element that are moved at a copy's speed, before and after the exchange. "dense" divides
# gradients by the number of ranks. "bf16" casts gradients before and after the exchange.
DENSE_PASSES = {"dense": (8, 0), "bf16": (6, 6)}
# Bytes per element of weights and of gradients that FSDP2 exchanges between shards.
SHARDS = {
    "FSDP2 in float32": (4.0, 4.0),
    "FSDP2 in bfloat16": (2.0, 2.0),
    "compress_fully_shard(model)": (8.25 / 8, 8.25 / 8),
}


class Step(NamedTuple):
    """Seconds and sent bytes per rank and step. With local steps, they are means over a period."""

    compute: float
    pack: float
    wire: float
    unpack: float
    wire_bytes: float

    @property
    def seconds(self) -> float:
        return self.compute + self.pack + self.wire + self.unpack


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, whose messages are those of one bucket.

    Attributes:
        numel: number of parameters.
        compute: seconds per step without the exchange.
        density: the density of the sparse hook.
        overlap: the fraction of `compute` that can overlap with the exchange.
    """

    numel: int
    compute: float
    kernels: Kernels
    density: float = 0.005
    overlap: float = 0.0

    def step(self, name: str, ranks: int, link: Link) -> Step:
        """Predict one step of the method `name` in METHODS."""
        method, copy = METHODS[name], self.kernels.copy
        if method.settings is None:
            nbytes = DENSE_BYTES[name] * self.numel
            before, after = (of * self.numel / copy for of in DENSE_PASSES[name])
            wire, sent = all_reduce(link, ranks, nbytes), 2 * (ranks - 1) * nbytes / ranks
        else:
            plan = self.plan(name, ranks)
            parts = self.numel / plan.numel
            before, after = (parts * of for of in self._kernels(plan))
            payload, sent = parts * plan.payload_bytes, parts * plan.wire_bytes
            wire = all_gather(link, ranks, payload)
            if plan.transport == "reduce_scatter":
                wire += all_to_all(link, ranks, payload * plan.owners / ranks)
        if method.period > 1:  # the exchange follows the optimizer's step, so nothing overlaps
            before += LOCAL_PACK_BYTES * self.numel / copy
            after += LOCAL_UNPACK_BYTES * self.numel / copy
        else:
            wire = max(0.0, wire - self.overlap * self.compute)
            if method.settings:
                before += self.kernels.host * buckets(self.numel)
        return Step(self.compute, *(of / method.period for of in (before, wire, after, sent)))

    def shards_step(self, name: str, ranks: int, link: Link) -> Step:
        """Predict one step of a method in SHARDS with a shard on each rank.

        A step gathers the weights twice (reshard_after_forward=True) and scatters the gradients.
        """
        weights, gradients = SHARDS[name]
        shard = self.numel / ranks
        wire = 2 * all_gather(link, ranks, weights * shard)
        wire += all_to_all(link, ranks, gradients * shard)
        sent = (ranks - 1) * (2 * weights + gradients) * shard
        packed = unpacked = 0.0
        if name.startswith("compress"):  # gradients and computed weights are in bfloat16
            packed = 2 * (4 + weights) * shard + (2 + gradients) * self.numel
            unpacked = 2 * (weights + 2) * self.numel + gradients * self.numel + 4 * shard
        times = (packed / self.kernels.quantize, unpacked / self.kernels.dequantize)
        wire = max(0.0, wire - self.overlap * self.compute)
        return Step(self.compute, times[0], wire, times[1], sent)

    def plan(self, name: str, ranks: int) -> BucketPlan:
        """Plan the messages of a DCT method for at most LARGEST elements, as dct_parallel does."""
        known, numel = METHODS[name].settings, min(self.numel, LARGEST)
        settings = dataclasses.replace(known, density=known.density or self.density)
        transport = transport_for(settings, numel, ranks)
        return BucketPlan(("model",), (numel,), settings, transport, ranks)

    def _kernels(self, plan: BucketPlan) -> tuple[float, float]:
        """Seconds that a rank spends on packing and on unpacking."""
        ranks, payload, every = plan.ranks, plan.payload_bytes, plan.settings.every_entry
        # A sparse payload is much smaller than the gradient, so writing the payload is not counted.
        packed, unpacked = PACK_BYTES * plan.numel + every * plan.owners * payload, 4 * plan.numel
        if plan.transport == "all_gather":
            unpacked += ranks * payload
        else:  # an owner sums its range, and packs the mean
            owned = plan.numel / plan.owners
            packed += PACK_BYTES * owned + every * payload
            unpacked += 4 * owned + (ranks + plan.owners) * payload
        kernels = self.kernels
        if every:
            return packed / kernels.quantize, unpacked / kernels.dequantize
        return packed / kernels.mask_pack, unpacked / kernels.scatter_unpack


def methods_for(optimizer: str, ranks: int) -> list[str]:
    """The dense methods, and the methods that docs/guide/which_method.md recommends for this case.

    Args:
        optimizer: "sgd" or "adamw".
    """
    return [
        name
        for name, method in METHODS.items()
        if method.optimizer in (None, optimizer) and ranks <= method.ranks
    ]
