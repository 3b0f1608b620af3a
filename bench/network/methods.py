"""The ways of exchanging gradients and embeddings that bench.link compares."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTAverager, DCTState, RowFormat, dct_hook
from dct_parallel.rows.all_to_all import RowExchange
from examples.dlrm.models.row_exchange import rows_in
from examples.dlrm.modes import MODES, START_STEP

PERIOD = 10  # of local steps

Register = Callable[[DistributedDataParallel, argparse.Namespace], object]


def _dct(**settings: object) -> Register:
    def register(ddp: DistributedDataParallel, options: argparse.Namespace) -> DCTState:
        chosen = {"density": options.density, "transport": "all_gather"} | settings
        state = DCTState(ddp, start_step=START_STEP, **chosen)
        ddp.register_comm_hook(state, dct_hook)
        return state

    return register


def _averager(model: nn.Module, options: argparse.Namespace) -> DCTAverager:
    return DCTAverager(model, period=PERIOD)


def _largest_entries(options: argparse.Namespace) -> RowExchange:
    return rows_in(RowFormat("bfloat16", density=options.row_density))


def _few_bits(options: argparse.Namespace) -> RowExchange:
    return rows_in(RowFormat(*options.row_format))


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


REPLICATED = {
    "dense": Method("dense float32", MODES["dense"]),
    "bf16": Method("bf16 hook", MODES["bf16"]),
    "powersgd1": Method("PowerSGD, rank 1", MODES["powersgd"]),
    "dct": Method("DCT", _dct()),
    "dct-int4": Method("every entry, int4", _dct(density=1.0, format="int4")),
    "dct-reduce-scatter": Method("DCT, reduce-scatter", _dct(transport="reduce_scatter")),
    "local-ternary": Method("local steps, ternary", _averager, period=PERIOD),
}
HYBRID = {
    "hybrid-dense": Method("hybrid, float32", MODES["dense"], lambda options: rows_in("float32")),
    "hybrid-dct": Method("hybrid, DCT-DP and -MP", _dct(), _largest_entries),
    "hybrid-format": Method("hybrid, DCT-DP, few bits", _dct(), _few_bits),
    "hybrid-format-dedup": Method("hybrid, DCT-DP, few bits, dedup", _dct(), _few_bits, True),
}
METHODS = REPLICATED | HYBRID
