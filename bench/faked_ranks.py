"""Collectives of `compress_fully_shard` on one rank, for the benchmark of hooks and for tests."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist

from dct_parallel.fsdp2 import collectives
from dct_parallel.fsdp2.units import units_of


@contextlib.contextmanager
def faked_collectives(module: torch.nn.Module, ranks: int) -> Iterator[tuple]:
    """Int8 collectives of a module on one rank, which process the messages of `ranks` ranks."""
    with (
        patch.object(dist, "get_process_group_ranks", lambda group: range(ranks)),
        patch.object(collectives, "all_gather", lambda *_: None),
        patch.object(dist, "all_to_all_single", lambda *_, **__: None),
        torch.no_grad(),
    ):
        (unit,) = units_of("bench.hooks", module)
        options = unit, None, "int8", lambda nbytes: None
        yield collectives.WeightGather(*options), collectives.GradientReduceScatter(*options)
