"""Statistics of the last steps."""

import warnings
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dct_kernels.layout import FLAG_NON_FINITE, FLAG_OVERFLOW, HEADER, HEADER_BYTES


class ExchangeResult(NamedTuple):
    """What this rank received, and the entries that were sent."""

    damaged: Sequence[str]  # payloads that this rank could not use, each with its sender
    non_finite: bool  # whether some sender saw a NaN or Inf
    counts: Sequence[int]  # entries that this rank packed, per range
    numel: int  # elements of these ranges
    overflowed: int  # payloads without room for all entries that passed
    payloads: int  # all payloads


class Header(NamedTuple):
    """Flags and count of a payload's header."""

    flags: int
    count: int  # type: ignore[assignment]  # in place of tuple.count

    @property
    def overflow(self) -> bool:
        return bool(self.flags & FLAG_OVERFLOW)

    @property
    def non_finite(self) -> bool:
        return bool(self.flags & FLAG_NON_FINITE)


def headers(payload: Tensor) -> list[Tensor]:
    """Views of the header of every row of `payload` [..., nbytes], int32 [16] each."""
    return list(payload.view(torch.int32).view(-1, payload.shape[-1] // 4)[:, : HEADER_BYTES // 4])


def read_headers(words: Sequence[Tensor]) -> list[Header]:
    """Views from `headers`, copied to the host, as numbers."""
    fields = HEADER.iter_unpack(bytes(torch.cat(list(words)).view(torch.uint8).tolist()))
    return [Header(flags, count) for _, _, _, flags, _, _, count, _ in fields]


class Readback:
    """One message from the device to the host at a time: `post`, and later `wait`.

    On CUDA `post` queues one kernel, which joins the tensors, and one copy to pinned memory, on the
    current stream; `wait` blocks until they are done. A step later they are, so the host does not
    stop and the queue does not drain.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._host = torch.empty(0, dtype=torch.int32)
        self._copied: torch.cuda.Event | None = None

    def post(self, *tensors: Tensor) -> None:
        """Copy these, int32 of one dimension and always of the same sizes, over the last ones."""
        words = torch.cat(tensors)
        if not self._sizes:
            self._sizes = [tensor.numel() for tensor in tensors]
            self._host = torch.empty(words.shape, dtype=words.dtype, pin_memory=words.is_cuda)
            self._copied = torch.cuda.Event() if words.is_cuda else None
        self._host.copy_(words, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors posted last, on the host, until the next are posted."""
        if self._copied is not None:
            self._copied.synchronize()
        tensors: tuple[Tensor, ...] = self._host.split(self._sizes)
        return tensors


RECENT_STEPS = 100

# Thresholds have the error of their samples, so with a quarter of headroom some 10 to 20 % of
# payloads overflow, by little, and different ones in the next step. Beyond half it is the rule.
OVERFLOW_WARNING = 0.5


class RecentStats:
    """Density and overflow of the last 100 steps; warns once if most payloads overflowed."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._warned = False

    def note(self, results: Sequence[ExchangeResult]) -> None:
        """Note a step, from the result of each bucket; nothing if there was no payload in it."""
        payloads = sum(one.payloads for one in results)
        if payloads:
            sent = sum(sum(one.counts) for one in results)
            numel = sum(one.numel for one in results)
            late = sum(one.overflowed for one in results)
            self.add(density=sent / max(numel, 1), overflow=late / payloads)

    def add(self, density: float, overflow: float) -> None:
        """Note a step: the fraction of entries sent, and of payloads without room for all."""
        self._steps.append((density, overflow))
        late = self.overflow or 0.0
        if late > OVERFLOW_WARNING and len(self._steps) == RECENT_STEPS and not self._warned:
            self._warned = True
            warnings.warn(
                f"DCT: {late:.0%} of the payloads of the last {RECENT_STEPS} steps had "
                "no room for all entries above the threshold: the rest is sent in later steps. "
                "Use policy 'fresh', a smaller refresh_every or a higher density.",
                stacklevel=2,
            )

    @property
    def density(self) -> float | None:
        """Mean fraction of entries sent; None before the first step."""
        return sum(d for d, _ in self._steps) / len(self._steps) if self._steps else None

    @property
    def overflow(self) -> float | None:
        """Fraction of payloads with less room than entries that passed; None before the first."""
        return sum(o for _, o in self._steps) / len(self._steps) if self._steps else None
