"""Where a training step's time goes, measured from outside any method."""

import functools
import threading
import time
from types import TracebackType

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

PHASES = ("compute", "pack", "wire", "unpack")
_COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "all_to_all_single",
)

Interval = tuple[float, float]  # perf_counter seconds


class Phases:
    """Times DDP's communication hook and the collectives it calls; the same for every method.

    compute: outside the exchange: forward, backward, optimizer. The exchange lasts from the call of
    the hook until its future is done. In it,
    pack: until the first collective starts;
    wire: some collective is under way, from its call to its completion. That includes waiting for
    a rank that comes later, and the CPU's work in the network stack;
    unpack: the rest: between collectives and after the last.

    Made for one bucket: with several, exchange and backward overlap, and the split says little.

    >>> with Phases() as phases:
    ...     phases.watch(ddp)  # before its hook is registered
    ...     step()
    ...     phases.take(seconds)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exchanges: list[Interval] = []
        self._wires: list[Interval] = []
        self._originals: dict = {}

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Time the hook that will be registered with `ddp`."""
        register = ddp.register_comm_hook

        def register_timed(state: object, hook) -> None:
            def timed(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
                start = time.perf_counter()
                # DDP waits for the future that `then` returns, so for this record, too.
                return hook(state, bucket).then(functools.partial(self._end_exchange, start))

            register(state, timed)

        ddp.register_comm_hook = register_timed

    def take(self, seconds: float) -> dict[str, float]:
        """{phase: seconds} since the last take, of a step that took `seconds`."""
        with self._lock:
            exchanges, self._exchanges = self._exchanges, []
            wires, self._wires = self._wires, []
        exchange, wire = _length(exchanges), _length(wires)
        pack = 0.0
        if exchanges:
            first = min((start for start, _ in wires), default=exchanges[0][1])
            pack = max(0.0, first - min(start for start, _ in exchanges))
        return {
            "compute": seconds - exchange,
            "pack": pack,
            "wire": wire,
            "unpack": exchange - pack - wire,
        }

    def __enter__(self) -> "Phases":
        for name in _COLLECTIVES:
            if hasattr(dist, name):  # names differ between torch versions
                self._originals[name] = getattr(dist, name)
                setattr(dist, name, self._timed(self._originals[name]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals.clear()

    def _end_exchange(self, start: float, future: Future) -> Tensor:
        with self._lock:
            self._exchanges.append((start, time.perf_counter()))
        return future.value()

    def _end_wire(self, start: float, _: object) -> None:
        with self._lock:
            self._wires.append((start, time.perf_counter()))

    def _timed(self, collective):
        @functools.wraps(collective)
        def timed(*args, **kwargs):
            start = time.perf_counter()
            work = collective(*args, **kwargs)
            if kwargs.get("async_op"):
                # Before the caller adds a callback of its own: they run in this order.
                work.get_future().add_done_callback(functools.partial(self._end_wire, start))
            else:
                self._end_wire(start, None)
            return work

        return timed


def _length(intervals: list[Interval]) -> float:
    """Of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
