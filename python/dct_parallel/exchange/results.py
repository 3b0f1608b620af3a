"""The result of an exchange, from words that the host copies from the device once per step."""

import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dct_kernels.layout import FLAG_NON_FINITE, FLAG_OVERFLOW

RECENT_STEPS = 100

# A sampled threshold has an error, so with a quarter of headroom 10 to 20 % of the payloads
# overflow by a little, and different payloads in the next step. Above half, something is wrong.
OVERFLOW_WARNING = 0.5

_OVERFLOW, _NON_FINITE = FLAG_OVERFLOW << 24, FLAG_NON_FINITE << 24


class ExchangeResult(NamedTuple):
    """The payloads that this rank received in one exchange, and the entries that it sent."""

    damaged: Sequence[str]  # payloads that this rank could not use, each with its possible senders
    non_finite: bool  # whether a sender had a NaN or Inf
    counts: Sequence[int]  # entries that this rank packed, per range
    numel: int  # elements of these ranges
    overflowed: int  # payloads with less capacity than entries above the threshold
    payloads: int  # all payloads


class HostCopy:
    """A tensor of the device, copied to the host asynchronously. `tolist` waits for the copy."""

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
    """A view of the headers of `payloads` [..., nbytes]: int32 [n, 2], flags and count."""
    rows = payloads.view(torch.int32).view(-1, payloads.shape[-1] // 4)
    return rows[:, 1:6:4]  # of a header's words, 1 has the flags in its last byte, 5 is the count


def overflowed(headers: Sequence[Sequence[int]]) -> int:
    """How many of these headers, as rows on the host, say that the payload overflowed."""
    return sum(row[0] & _OVERFLOW != 0 for row in headers)


def non_finite(headers: Sequence[Sequence[int]]) -> bool:
    """Whether one of these headers says that there was a NaN or Inf."""
    return any(row[0] & _NON_FINITE for row in headers)


def counts(headers: Sequence[Sequence[int]]) -> list[int]:
    """Entries in the payload of each header."""
    return [row[1] & 0xFFFFFFFF for row in headers]


class RecentStats:
    """Density and overflow of the last 100 steps. Warns once if most payloads overflowed."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._warned = False

    def add(self, results: Sequence[ExchangeResult]) -> None:
        """Add a step, from the result of each bucket. A step without payloads is left out."""
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
        """Fraction of payloads that overflowed; None before the first step."""
        return sum(o for _, o in self._steps) / len(self._steps) if self._steps else None
