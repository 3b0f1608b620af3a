"""The results of exchanges, from words that the host copies from the device once per step."""

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from dct_kernels.layout import FLAG_NON_FINITE, FLAG_OVERFLOW

from .._torch import span

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


# The result of an exchange that raised an error on this rank, or that was never completed.
_FAILED = ExchangeResult(["a failed exchange"], False, [], 0, 0, 0)


class Exchange(Protocol):
    """A bucket, or any other sender of messages whose results are read once per step.

    Attributes:
        words: int32 tensors on the device, [n] or [n, 2], the results of the last exchange. Empty
            during an exchange and if it has failed.
    """

    words: Sequence[Tensor]

    def result(self, words: Sequence[Sequence[int]]) -> ExchangeResult:
        """Return the result. `words` are the rows of the tensors in `words`, on the host."""

    def take_back(self) -> None:
        """Return the entries of the last exchange to the residual, for a step that is dropped."""


def damaged_messages(ranks: Sequence[int], codes: Sequence[int], what: str = "") -> list[str]:
    """Describe the damaged messages, given each rank's status. `what` ends each text."""
    return [
        f"status {code} from rank {rank}{what}"
        for rank, code in zip(ranks, codes, strict=True)
        if code
    ]


class Statuses:
    """An `Exchange` without a residual, whose results are the statuses of the received messages.

    Args:
        status: int32 [P], not 0 for a damaged message.
        ranks: the senders.
    """

    def __init__(self, status: Tensor, ranks: Sequence[int]) -> None:
        self.words: Sequence[Tensor] = [status]
        self._ranks = ranks

    def result(self, words: Sequence[Sequence[int]]) -> ExchangeResult:
        """Return the damaged messages, given the rows of `words` on the host."""
        damaged = damaged_messages(self._ranks, [row[0] for row in words])
        return ExchangeResult(damaged, False, [], 0, 0, 0)

    def take_back(self) -> None:
        """Do nothing, because there is no residual."""


class HostCopy:
    """An asynchronous copy of a tensor to the host. `tolist` waits for the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._copied = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            # By default, an event records a stream of the current device.
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        return self._copied is None or self._copied.query()

    def tolist(self) -> list[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


class StepResults:
    """The results of the exchanges of one step, copied to the host together.

    On CUDA, a kernel concatenates the words of all exchanges, and one asynchronous copy transfers
    them to pinned memory. `read` blocks until the copy is done.

    Args:
        exchanges: {name for error messages: exchange}.
        run_after: runs a function after the exchanges, possibly later. It returns None if the
            function is done.
    """

    def __init__(self, exchanges: Mapping[str, Exchange], run_after: "RunAfter") -> None:
        self._exchanges, self._rows = dict(exchanges), dict.fromkeys(exchanges, 0)
        self._words: HostCopy | None = None
        self._posted = run_after(self._post)

    def _post(self) -> None:
        words: list[Tensor] = []
        for name, exchange in self._exchanges.items():
            # Expand a status [n] to [n, 2], the width of the words of a header.
            words += [w if w.dim() == 2 else w.unsqueeze(1).expand(-1, 2) for w in exchange.words]
            self._rows[name] = sum(map(len, exchange.words))
        if words:
            with span("dct::read_back"):
                self._words = HostCopy(torch.cat(words))

    def wait_posted(self) -> None:
        """Wait until the words are copied from the payloads. On CUDA the current stream waits."""
        if self._posted is not None:
            self._posted.wait()

    def has_arrived(self) -> bool:
        """Whether `read` does not wait for the device. The exchanges must be complete."""
        return self._words is None or self._words.has_arrived()

    def read(self) -> dict[str, ExchangeResult]:
        """Return {name: the result of the exchange}. Waits for the exchanges."""
        self.wait_posted()
        words, results, start = self._words.tolist() if self._words else [], {}, 0
        for name, exchange in self._exchanges.items():
            end = start + self._rows[name]
            results[name] = exchange.result(words[start:end]) if end > start else _FAILED
            start = end
        return results


RunAfter = Callable[[Callable[[], None]], Future[None] | None]


def run_now(call: Callable[[], None]) -> None:
    """The `run_after` of exchanges that are complete."""
    call()


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
        # (number of a step, density, fraction of payloads that overflowed)
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=RECENT_STEPS)
        self._warned = False

    def add(self, number: int, results: Sequence[ExchangeResult]) -> None:
        """Add a step from the results of its buckets. A step without payloads is skipped.

        If the results of the first buckets were read before the step ended, replaces the step.
        """
        payloads = sum(result.payloads for result in results)
        if not payloads:
            return
        sent = sum(sum(result.counts) for result in results)
        numel = sum(result.numel for result in results)
        overflowed = sum(result.overflowed for result in results)
        if self._steps and self._steps[-1][0] == number:
            self._steps.pop()
        self._steps.append((number, sent / max(numel, 1), overflowed / payloads))
        overflow = self.overflow or 0.0
        if overflow > OVERFLOW_WARNING and len(self._steps) == RECENT_STEPS and not self._warned:
            self._warned = True
            warnings.warn(
                f"DCT: {overflow:.0%} of the payloads of the last {RECENT_STEPS} steps had "
                "too little capacity for the entries above the threshold: the rest is sent later. "
                "If refresh_every is above 1, use a smaller one. Otherwise use a higher density.",
                stacklevel=2,
            )

    @property
    def density(self) -> float | None:
        """The mean fraction of entries sent. None before the first step."""
        return self._mean(1)

    @property
    def overflow(self) -> float | None:
        """The fraction of payloads that overflowed. None before the first step."""
        return self._mean(2)

    def _mean(self, column: int) -> float | None:
        return sum(step[column] for step in self._steps) / len(self._steps) if self._steps else None
