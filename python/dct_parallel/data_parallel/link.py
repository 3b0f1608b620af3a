"""What an exchange costs on a link: measured at start, or read from a file."""

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dct_kernels import checks

from ..collectives import all_gather
from ..compressor import Compressor
from ..wire import all_gather_bytes, all_reduce_bytes
from .bucket_plan import Settings

SMALL, LARGE = 64, 2**20  # bytes that a rank gives to a collective under measurement
ELEMENTS = 2**20  # that are packed and unpacked
REPEATS = 5
MODES = ("bf16", "dct", "dct-shard")  # of dct-bench link


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
    def from_json(cls, values: list[Any]) -> "Link":
        """From what JSON made of one."""
        all_gather, all_to_all, all_reduce, *local = values
        return cls(Cost(*all_gather), Cost(*all_to_all), Cost(*all_reduce), *local)


def probe(group: dist.ProcessGroup, device: torch.device, settings: Settings) -> Link:
    """Measure the link of these ranks; a collective. Sends 18 MiB a rank on 2 ranks, 45 on 4."""
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
    generator = torch.Generator(device).manual_seed(0)  # the run's own draws what it drew without
    grad = torch.randn(ELEMENTS, device=device, generator=generator)
    payloads = torch.stack([compressor.pack(grad)] * ranks)
    out = torch.empty_like(grad)
    return Link(
        _cost(gather, all_gather_bytes, ranks),
        _cost(to_all, all_gather_bytes, ranks),
        _cost(reduce, all_reduce_bytes, ranks),
        _seconds(lambda: compressor.pack(grad), device) / ELEMENTS,
        _seconds(lambda: compressor.unpack(payloads, out), device) / ELEMENTS,
        _seconds(lambda: out.copy_(grad.to(torch.bfloat16).div_(ranks)), device) / ELEMENTS,
    )


def read(path: str | os.PathLike[str], ranks: int) -> Link:
    """From the JSON of `dct-bench link` with this number of ranks and one rate.

    Raises:
        ValueError: it is not, or lacks one of the modes bf16, dct and dct-shard.
    """
    try:
        with open(path) as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        checks.fail("DCTState", "link", "'probe' or a JSON file", error)
    try:
        return _from_content(content, ranks)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        rule = f"of dct-bench link --ranks {ranks}, one rate, and modes {', '.join(MODES)}"
        checks.fail("DCTState", "link", rule, os.fspath(path))


def _from_content(content: dict[str, Any], ranks: int) -> Link:
    """What `read` makes of the JSON; any error means that it is not what `read` wants."""
    (link,) = (link for link in content["links"] if _is_of(link, ranks))
    cells = {c["mode"]: c for c in content["cells"] if _is_of(c, ranks) and c["step_ms"]}
    per_byte: float = 8 / link["bits_per_second"]
    numel: int = content["model"]["parameters"]
    bf16, dct, shard = (cells[mode] for mode in MODES)

    def fixed(cell: dict[str, Any]) -> float:
        seconds: float = cell["phases_ms"]["wire"] / 1e3 - cell["payload_bytes"] * per_byte
        return max(0.0, seconds)

    def local(cell: dict[str, Any], *phases: str) -> float:
        seconds: float = sum(cell["phases_ms"][phase] for phase in phases) / 1e3
        return seconds / numel

    return Link(
        Cost(fixed(dct), per_byte),
        Cost(max(0.0, fixed(shard) - fixed(dct)), per_byte),
        Cost(fixed(bf16), per_byte),
        local(dct, "pack"),
        local(dct, "unpack"),
        local(bf16, "pack", "unpack"),
    )


def _is_of(entry: dict[str, Any], ranks: int) -> bool:
    return (entry["ranks"], entry.get("local_size", 1)) == (ranks, 1)


def _cost(seconds: Callable[[int], float], sent: Callable[[int, int], int], ranks: int) -> Cost:
    """Of a collective that takes `seconds(n)` where every rank gives n bytes."""
    small, large = seconds(SMALL), seconds(LARGE)
    more = sent(LARGE, ranks) - sent(SMALL, ranks)
    per_byte = max(0.0, large - small) / more if more else 0.0
    return Cost(max(0.0, small - sent(SMALL, ranks) * per_byte), per_byte)


def _seconds(job: Callable[[], object], device: torch.device) -> float:
    """Median of a few runs, after one that is not counted."""
    times = []
    for _ in range(1 + REPEATS):
        _finish(device)
        start = time.perf_counter()
        job()
        _finish(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
