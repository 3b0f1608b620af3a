"""The results of exchanges, from words that the host copies from the device once per step."""

import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dct_kernels.layout import FLAG_NON_FINITE, FLAG_OVERFLOW

RECENT_STEPS = 100

# Sampled thresholds are inexact. With the default headroom of a quarter and a density of 0.5 % or
# less, 10 to 20 % of the payloads overflow slightly. Different payloads overflow in each step. If
# more than half of the payloads overflow, there is a problem.
OVERFLOW_WARNING = 0.5

_OVERFLOW, _NON_FINITE = FLAG_OVERFLOW << 24, FLAG_NON_FINITE << 24


class ExchangeResult(NamedTuple):
    """The result of one exchange on this rank."""

    damaged: Sequence[str]  # one description per damaged payload, with its possible senders
    non_finite: bool  # whether a sender had a NaN or Inf
    counts: Sequence[int]  # number of entries that this rank packed, per range
    numel: int  # number of elements of these ranges
    overflowed: int  # number of payloads with more entries above the threshold than capacity
    payloads: int  # number of payloads


class HostCopy:
    """An asynchronous copy of a tensor to the host. `tolist` waits for the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._copied = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def tolist(self) -> list[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


def header_words(payloads: Tensor) -> Tensor:
    """A view of the headers of `payloads` [..., nbytes] as int32 [n, 2]: flags and count."""
    rows = payloads.view(torch.int32).view(-1, payloads.shape[-1] // 4)
    return rows[:, 1:6:4]  # word 1 has the flags in its last byte, word 5 is the count


def overflowed(headers: Sequence[Sequence[int]]) -> int:
    """The number of payloads that overflowed, given their headers as rows on the host."""
    return sum(row[0] & _OVERFLOW != 0 for row in headers)


def non_finite(headers: Sequence[Sequence[int]]) -> bool:
    """Whether the payload of one of these headers had a NaN or Inf."""
    return any(row[0] & _NON_FINITE for row in headers)


def counts(headers: Sequence[Sequence[int]]) -> list[int]:
    """The number of entries in the payload of each header."""
    return [row[1] & 0xFFFFFFFF for row in headers]


class RecentStats:
    """Density and overflow of the last 100 steps. Warns once if most payloads overflowed."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._warned = False

    def add(self, results: Sequence[ExchangeResult]) -> None:
        """Add a step from the results of its buckets. A step without payloads is skipped."""
        payloads = sum(result.payloads for result in results)
        if not payloads:
            return
        sent = sum(sum(result.counts) for result in results)
        numel = sum(result.numel for result in results)
        overflowed = sum(result.overflowed for result in results)
        self._steps.append((sent / max(numel, 1), overflowed / payloads))
        overflow = self.overflow or 0.0
        if overflow > OVERFLOW_WARNING and len(self._steps) == RECENT_STEPS and not self._warned:
            self._warned = True
            warnings.warn(
                f"DCT: {overflow:.0%} of the payloads of the last {RECENT_STEPS} steps had "
                "too little capacity for the entries above the threshold: the rest is sent later. "
                "Use a smaller refresh_every or a higher density.",
                stacklevel=2,
            )

    @property
    def density(self) -> float | None:
        """The mean fraction of entries sent. None before the first step."""
        return sum(d for d, _ in self._steps) / len(self._steps) if self._steps else None

    @property
    def overflow(self) -> float | None:
        """The fraction of payloads that overflowed. None before the first step."""
        return sum(o for _, o in self._steps) / len(self._steps) if self._steps else None
