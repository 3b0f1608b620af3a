"""How ranks exchange gradients and embeddings in bench.link: DCT, and what it is compared with."""

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from bench.topk import take_largest
from dct_parallel import DCTAverager, DCTState, RowFormat, dct_hook, node_mesh
from dct_parallel.collectives import all_gather, dense_mean
from dct_parallel.rows.all_to_all import RowExchange
from examples.dlrm.models.row_exchange import rows_in

PERIOD = 10  # of local steps
START_STEP = 2  # steps before compression starts, in every mode that has a residual

Register = Callable[[DistributedDataParallel, argparse.Namespace], object]


class TopKState:
    """Exact top-k of the whole bucket with error feedback. DCT's threshold approximates it.

    Values are float32 and indices int32, both in one all-gather; dense before START_STEP. The
    residual belongs to one bucket, so the model must be in one bucket.
    """

    def __init__(self, density: float) -> None:
        self.density = density
        self.step = 0
        self.residual: Tensor | None = None


def topk_hook(state: TopKState, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook. It blocks, because one bucket has nothing to overlap with."""
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


def _dense(ddp: DistributedDataParallel, options: argparse.Namespace) -> None:
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


def _bf16(ddp: DistributedDataParallel, options: argparse.Namespace) -> None:
    # DDP refuses torch's bf16_compress_hook by its name on a CPU, where it works as well.
    def hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
        return default_hooks.bf16_compress_hook(group, bucket)

    ddp.register_comm_hook(None, hook)


def _powersgd(ddp: DistributedDataParallel, options: argparse.Namespace) -> None:
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=START_STEP
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _dct(mesh: bool = False, **settings: object) -> Register:
    def register(ddp: DistributedDataParallel, options: argparse.Namespace) -> DCTState:
        nodes = node_mesh(options.local_size, "cpu") if mesh else None
        chosen = {"density": options.density, "transport": "all_gather"} | settings
        state = DCTState(ddp, mesh=nodes, start_step=START_STEP, **chosen)
        ddp.register_comm_hook(state, dct_hook)
        return state

    return register


def _averager(**settings: object) -> Callable:
    def make(model: nn.Module, options: argparse.Namespace) -> DCTAverager:
        return DCTAverager(model, period=PERIOD, **settings)

    return make


class Method(NamedTuple):
    """One way of training.

    Attributes:
        title: in tables.
        register: registers the hook, or makes the averager; returns its state.
        exchange: of a hybrid model's rows; None if every rank has the whole model.
        dedup: each distinct row of a batch is sent once.
        period: of local steps, without DDP; 0 for other methods.
    """

    title: str
    register: Callable[[nn.Module, argparse.Namespace], object]
    exchange: Callable[[argparse.Namespace], RowExchange] | None = None
    dedup: bool = False
    period: int = 0


def _float32_rows(options: argparse.Namespace) -> RowExchange:
    return rows_in("float32")


def _largest_entries(options: argparse.Namespace) -> RowExchange:
    return rows_in(RowFormat("bfloat16", density=options.row_density))


def _few_bits(options: argparse.Namespace) -> RowExchange:
    return rows_in(RowFormat(*options.row_format))


REPLICATED = {
    "dense": Method("dense float32", _dense),
    "bf16": Method("bf16 hook", _bf16),
    "powersgd1": Method("PowerSGD, rank 1", _powersgd),
    "topk": Method("exact top-k", _topk),
    "dct": Method("DCT", _dct()),
    "dct-int4": Method("every entry, int4", _dct(density=1.0, format="int4")),
    "dct-reduce-scatter": Method("DCT, reduce-scatter", _dct(transport="reduce_scatter")),
    "local-ternary": Method("local steps, ternary", _averager(), period=PERIOD),
}
HYBRID = {
    "hybrid-dense": Method("hybrid, float32", _dense, _float32_rows),
    "hybrid-dct": Method("hybrid, DCT-DP and -MP", _dct(), _largest_entries),
    "hybrid-format": Method("hybrid, DCT-DP, few bits", _dct(), _few_bits),
    "hybrid-format-dedup": Method("hybrid, DCT-DP, few bits, dedup", _dct(), _few_bits, True),
}
MESH = {"dct-mesh": Method("DCT, mesh", _dct(mesh=True))}
METHODS = REPLICATED | HYBRID | MESH
