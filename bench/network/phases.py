"""The phases of a training step, measured without changing the methods."""

import functools
import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dct_parallel.rows.all_to_all import RowExchange

PHASES = ("compute", "pack", "wire", "unpack")
_COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
)

Interval = tuple[float, float]  # perf_counter seconds


class Phases:
    """Times exchanges and their collectives from outside, equally for every method.

    compute: outside exchanges and collectives. DDP's exchange lasts from the call of its hook until
    its future is done. The exchange of a hybrid model's rows lasts, forward, as long as the call;
    backward, from the gradient of its result to the gradient of its input. In an exchange,
    pack: until the first collective that starts during it;
    wire: a collective is under way. That includes waiting for a slower rank, and the CPU's work in
    the network stack;
    unpack: the rest.

    Each moment counts once: as wire, else as pack, else as unpack. With several buckets exchange
    and backward overlap, and the split says little.

    >>> with Phases() as phases:
    ...     phases.watch(ddp)  # before its hook is registered
    ...     step()
    ...     phases.take(seconds)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[str, list[Interval]] = {"exchange": [], "wire": []}
        self._originals: dict = {}

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Time the hook that will be registered with `ddp`."""
        register = ddp.register_comm_hook

        def register_timed(state: object, hook) -> None:
            def timed(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
                start = time.perf_counter()

                def end(future: Future) -> Tensor:
                    self._end("exchange", start)
                    return future.value()

                # DDP waits for the future that `then` returns, so also for this record.
                return hook(state, bucket).then(end)

            register(state, timed)

        ddp.register_comm_hook = register_timed

    def timed(self, exchange: RowExchange) -> RowExchange:
        """The exchange of rows, timed forward and backward."""

        def timed(x: Tensor, *args: object, **kwargs: object) -> Tensor:
            start = time.perf_counter()
            y = exchange(x, *args, **kwargs)
            self._end("exchange", start)
            if y.requires_grad:
                begun: list[float] = []
                y.register_hook(lambda _: begun.append(time.perf_counter()))
                x.register_hook(lambda _: self._end("exchange", begun.pop()))
            return y

        return timed

    def timed_call(self, exchange: Callable[[], None]) -> Callable[[], None]:
        """The exchange of weights, timed."""

        def timed() -> None:
            start = time.perf_counter()
            exchange()
            self._end("exchange", start)

        return timed

    def take(self, seconds: float) -> dict[str, float]:
        """{phase: seconds} since the last take, of a step that took `seconds`."""
        with self._lock:
            exchanges, wires = self._ended["exchange"], self._ended["wire"]
            self._ended = {"exchange": [], "wire": []}
        starts = sorted(start for start, _ in wires)
        packs = [
            (start, next((wire for wire in starts if start <= wire <= end), end))
            for start, end in exchanges
        ]
        wire, packed = _length(wires), _length(wires + packs)
        total = _length(wires + exchanges)
        return {
            "compute": seconds - total,
            "pack": packed - wire,
            "wire": wire,
            "unpack": total - packed,
        }

    def __enter__(self) -> "Phases":
        for name in _COLLECTIVES:
            if hasattr(dist, name):  # names differ between torch versions
                self._originals[name] = getattr(dist, name)
                setattr(dist, name, self._timed(self._originals[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals.clear()

    def _end(self, what: str, start: float) -> None:
        with self._lock:
            self._ended[what].append((start, time.perf_counter()))

    def _timed(self, collective):
        @functools.wraps(collective)
        def timed(*args, **kwargs):
            start = time.perf_counter()

            def end(_: object = None) -> None:
                self._end("wire", start)

            work = collective(*args, **kwargs)
            if kwargs.get("async_op"):
                # Before the caller adds a callback of its own: they run in this order.
                work.get_future().add_done_callback(end)
            else:
                end()
            return work

        return timed


def _length(intervals: list[Interval]) -> float:
    """The length of the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
