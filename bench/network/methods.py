"""How ranks exchange gradients and embeddings: the training application's modes, and more peers."""

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTAverager, RowFormat
from dct_parallel.collectives import all_gather, dense_mean
from dct_parallel.rows.all_to_all import RowExchange
from dlrm.models.row_exchange import EXCHANGES, rows_in
from dlrm.modes import MODES, START_STEP
from topk import take_largest

PERIOD = 10  # of local steps


class TopKState:
    """Exact top-k of the whole bucket with error feedback: what DCT's threshold stands in for.

    Values are float32, indices int32, one all-gather of both; dense before START_STEP. For a model
    in one bucket: the residual belongs to that bucket.
    """

    def __init__(self, density: float) -> None:
        self.density = density
        self.step = 0
        self.residual: Tensor | None = None


def topk_hook(state: TopKState, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook. Done when it returns: one bucket has nothing to overlap with."""
    done: Future[Tensor] = Future()
    done.set_result(_topk_mean(state, bucket.buffer()))
    state.step += bucket.is_last()
    return done


def _topk_mean(state: TopKState, buffer: Tensor) -> Tensor:
    group = dist.group.WORLD
    if state.step < START_STEP:
        return buffer.copy_(dense_mean(buffer, torch.bfloat16, group))
    if state.residual is None:
        state.residual = torch.zeros_like(buffer)
    accumulated = state.residual.add_(buffer)
    k = math.ceil(state.density * buffer.numel())
    values, index = take_largest(accumulated, k)
    payload = torch.cat([values.view(torch.int32), index.to(torch.int32)])
    received = payload.new_empty(group.size(), 2 * k)
    all_gather(received, payload, group)
    bits, index = received.unflatten(1, (2, k)).unbind(1)
    values = bits.reshape(-1).view(torch.float32)
    return buffer.zero_().index_add_(0, index.reshape(-1), values / group.size())


def _topk(ddp: DistributedDataParallel, options: argparse.Namespace) -> None:
    ddp.register_comm_hook(TopKState(options.density), topk_hook)


def _powersgd(rank: int) -> Callable:
    def register(ddp: DistributedDataParallel, options: argparse.Namespace) -> None:
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=START_STEP
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


def _dct_with(mesh: bool = False, **chosen: object) -> Callable:
    def register(ddp: DistributedDataParallel, options: argparse.Namespace) -> object:
        local_size = {"local_size": options.node_ranks} if mesh else {}
        return MODES["dct"](ddp, argparse.Namespace(**vars(options) | chosen | local_size))

    return register


def _averager(**settings) -> Callable:
    def make(model: nn.Module, options: argparse.Namespace) -> DCTAverager:
        return DCTAverager(model, period=PERIOD, **settings)

    return make


Leaving = Callable[[int, int], float]  # of ranks, and ranks a node


def _ring(ranks: int, local_size: int) -> float:
    return 1 / local_size


def _to_owners(ranks: int, local_size: int) -> float:
    # Half goes to all other ranks, of whom some are in the node; results go round in a ring.
    return ((ranks - local_size) / (ranks - 1) + _ring(ranks, local_size)) / 2


def _everything(ranks: int, local_size: int) -> float:
    return 1.0


class Method(NamedTuple):
    """One way of training; `exchange` is of a hybrid model's rows, None where all is replicated.

    With `dedup` each distinct row of a batch crosses once. `leaving`: which part of what ranks hand
    to collectives, those inside the nodes of a mesh apart, leaves their node. A ring goes through
    all ranks of a node, and only the last one's successor is in another. With a `period` ranks take
    local steps, and average their weights as often: there is no DDP.
    """

    title: str
    # Its hook, or its averager; returns the state.
    register: Callable[[nn.Module, argparse.Namespace], object]
    exchange: Callable[[argparse.Namespace], RowExchange] | None = None
    dedup: bool = False
    leaving: Leaving = _ring
    period: int = 0

    @property
    def dense(self) -> str:
        """The method that sends everything in float32, of the same model."""
        return "dense" if self.exchange is None else "hybrid-dense"

    @property
    def dct(self) -> str:
        """The method that compresses everything, of the same model."""
        return "dct" if self.exchange is None else "hybrid-dct"


def _largest_entries(options: argparse.Namespace) -> RowExchange:
    return rows_in(RowFormat("bfloat16", density=options.row_density))


def _few_bits(options: argparse.Namespace) -> RowExchange:
    return rows_in(RowFormat(*options.row_format))


_float32_rows = EXCHANGES["dense"]
REPLICATED = {
    "dense": Method("dense float32", MODES["dense"]),
    "bf16": Method("bf16 hook", MODES["bf16"]),
    "powersgd1": Method("PowerSGD, rank 1", _powersgd(1)),
    "powersgd2": Method("PowerSGD, rank 2", _powersgd(2)),
    "topk": Method("exact top-k", _topk),
    "dct": Method("DCT", MODES["dct"]),
    "dct-int4": Method("every entry, int4", _dct_with(density=1.0, format="int4")),
    "dct-reduce-scatter": Method(
        "DCT, reduce-scatter", _dct_with(transport="reduce_scatter"), leaving=_to_owners
    ),
}
LOCAL = {
    "local": Method("local steps, 10 %", _averager(density=0.1), period=PERIOD),
    "local-ternary": Method("local steps, ternary", _averager(), period=PERIOD),
    "local-float32": Method(
        "local steps, float32", _averager(format="float32", density=1), period=PERIOD
    ),
}
HYBRID = {
    "hybrid-dense": Method("hybrid, float32", MODES["dense"], _float32_rows),
    "hybrid-dp": Method("hybrid, DCT-DP", MODES["dct"], _float32_rows),
    "hybrid-dct": Method("hybrid, DCT-DP and -MP", MODES["dct"], _largest_entries),
    "hybrid-dense-dedup": Method("hybrid, float32, dedup", MODES["dense"], _float32_rows, True),
    "hybrid-format": Method("hybrid, DCT-DP, few bits", MODES["dct"], _few_bits),
    "hybrid-format-dedup": Method("hybrid, DCT-DP, few bits, dedup", MODES["dct"], _few_bits, True),
}
MESH = {
    "dct-mesh": Method(
        "DCT, mesh", _dct_with(mesh=True, transport="all_gather"), leaving=_everything
    ),
    "dct-mesh-reduce-scatter": Method(
        "DCT, mesh, reduce-scatter",
        _dct_with(mesh=True, transport="reduce_scatter"),
        leaving=_everything,
    ),
}
METHODS = REPLICATED | LOCAL | HYBRID | MESH
