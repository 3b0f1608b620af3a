"""What an exchange costs on a link: measured at start, or read from a file."""

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from dct_kernels import checks

from ..collectives import all_gather, dense_mean
from ..compressor import Compressor
from ..wire import all_gather_bytes, all_reduce_bytes
from .bucket_plan import Settings

SMALL, LARGE = 64, 2**20  # bytes that a rank gives to a collective under measurement
ELEMENTS = 2**20  # that are packed and unpacked
REPEATS = 5


class Cost(NamedTuple):
    """Seconds of a collective: `fixed`, and `per_byte` that a rank sends."""

    fixed: float
    per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.fixed + nbytes * self.per_byte


class Link(NamedTuple):
    """What collectives cost, and seconds an element: to pack, unpack, cast to bfloat16 and back."""

    all_gather: Cost
    all_to_all: Cost
    all_reduce: Cost
    pack: float
    unpack: float
    cast: float

    @classmethod
    def from_json(cls, values: list) -> "Link":
        """From what JSON made of one."""
        return cls(*(Cost(*value) if isinstance(value, list) else value for value in values))


def probe(group: dist.ProcessGroup, device: torch.device, settings: Settings) -> Link:
    """Measure the link of these ranks; a collective. Sends some 30 MiB a rank."""
    ranks = group.size()

    def gather(nbytes: int) -> float:
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        received = sent.new_empty(ranks, nbytes)
        return _seconds(lambda: all_gather(received, sent, group), device)

    def to_all(nbytes: int) -> float:
        sent = torch.zeros(ranks, nbytes, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)
        return _seconds(lambda: dist.all_to_all_single(received, sent, group=group), device)

    def reduce(nbytes: int) -> float:
        sent = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        return _seconds(lambda: dist.all_reduce(sent, group=group), device)

    compressor = Compressor(
        ELEMENTS, [0, ELEMENTS], settings.density, value_dtype=settings.value_dtype, device=device
    )
    compressor.step = 3  # samples no threshold
    grad = torch.randn(ELEMENTS, device=device)
    compressor.threshold.copy_(grad.abs().kthvalue(int((1 - settings.density) * ELEMENTS) + 1)[0])
    payloads = torch.stack([compressor.pack(grad)] * ranks)
    compressor.policy = "fixed"
    return Link(
        _cost(gather, all_gather_bytes, ranks),
        _cost(to_all, all_gather_bytes, ranks),
        _cost(reduce, all_reduce_bytes, ranks),
        _seconds(lambda: compressor.pack(grad), device) / ELEMENTS,
        _seconds(lambda: compressor.unpack(payloads, grad), device) / ELEMENTS,
        _seconds(lambda: grad.copy_(grad.to(torch.bfloat16).div_(ranks)), device) / ELEMENTS,
    )
