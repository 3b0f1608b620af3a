"""The methods of exchanging gradients and embeddings that bench.link compares."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTAverager, DCTState, RowFormat, compress_fully_shard, dct_hook
from dct_parallel.rows.all_to_all import RowExchange
from dlrm.models.row_exchange import rows_in
from dlrm.modes import MODES, START_STEP

PERIOD = 10  # number of local steps

Register = Callable[[nn.Module, argparse.Namespace], object]


def _dct(**settings: object) -> Register:
    def register(ddp: DistributedDataParallel, options: argparse.Namespace) -> DCTState:
        state = DCTState(ddp, start_step=START_STEP, **{"density": options.density} | settings)
        ddp.register_comm_hook(state, dct_hook)
        return state

    return register


def _averager(model: nn.Module, options: argparse.Namespace) -> DCTAverager:
    return DCTAverager(model, period=PERIOD)


def _shards(weights: str | None, gradients: str | None, reshard: bool | None = None) -> Register:
    """Shard a transformer. Unless the formats are None, compress the messages between shards."""

    def register(model: nn.Module, options: argparse.Namespace) -> object:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for module in (*model.blocks, model):
            fully_shard(module, mp_policy=policy, reshard_after_forward=reshard)
        return weights and compress_fully_shard(model, weights=weights, gradients=gradients)

    return register


def _largest_entries(options: argparse.Namespace) -> RowExchange:
    return rows_in(RowFormat("bfloat16", density=options.row_density))


def _quantized(options: argparse.Namespace) -> RowExchange:
    return rows_in(RowFormat(*options.row_format))


class Method(NamedTuple):
    """A training method.

    Attributes:
        title: the name in tables.
        register: registers the hook or makes the averager, and returns its state.
        exchange: exchanges the rows of a hybrid model; None if every rank has the whole model.
        dedup: send each distinct row of a batch once.
        period: number of local steps per averaging; 0 for methods that use no local steps.
        group: the format of a process group "dct" for DDP; None for the default group.
    """

    title: str
    register: Register
    exchange: Callable[[argparse.Namespace], RowExchange] | None = None
    dedup: bool = False
    period: int = 0
    group: str | None = None


REPLICATED = {
    "dense": Method("dense float32", MODES["dense"]),
    "bf16": Method("bf16 hook", MODES["bf16"]),
    "powersgd1": Method("PowerSGD, rank 1", MODES["powersgd"]),
    "dct": Method("DCT", _dct()),
    "dct-int4": Method("int4 hook", _dct(density=1.0, format="int4")),
    "dct-reduce-scatter": Method("DCT, reduce-scatter", _dct(transport="reduce_scatter")),
    "group-int8": Method("process group, int8", lambda ddp, options: None, group="int8"),
    "local-ternary": Method("local steps, ternary", _averager, period=PERIOD),
}
HYBRID = {
    "hybrid-dense": Method("hybrid, float32", MODES["dense"], lambda options: rows_in("float32")),
    "hybrid-dct": Method("hybrid, DCT-DP and -MP", _dct(), _largest_entries),
    "hybrid-format": Method("hybrid, DCT-DP, quantized", _dct(), _quantized),
    "hybrid-format-dedup": Method("hybrid, DCT-DP, quantized, dedup", _dct(), _quantized, True),
}
SHARDED = {
    "fsdp-torch": Method("torch's FSDP2 in bfloat16", _shards(None, None)),
    "fsdp-bfloat16": Method("bfloat16", _shards("bfloat16", "bfloat16")),
    "fsdp-int8": Method("int8, int8", _shards("int8", "int8")),
    "fsdp-int8-int4": Method("int8, int4", _shards("int8", "int4")),
    "fsdp-bfloat16-kept": Method("bfloat16, no resharding", _shards("bfloat16", "bfloat16", False)),
    "fsdp-int8-kept": Method("int8, int8, no resharding", _shards("int8", "int8", False)),
}
METHODS = REPLICATED | HYBRID | SHARDED
