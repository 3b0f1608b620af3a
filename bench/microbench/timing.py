"""Times calls in turns, on buffers that are not in a cache."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator

import torch

# While the host queues a call, the device is kept busy for about 0.1 ms, or up to 1.6 ms if queuing
# takes longer.
_SLEEP_CYCLES, _MOST_CYCLES = 200_000, 3_200_000

Call = Callable[[int], object]


def take_turns(
    calls: dict[str, Call],
    reset: Call,
    sets: dict[str, int],
    rounds: dict[str, int],
    device: str,
    graphs: Collection[str] = (),
    seconds: float = math.inf,
) -> dict[str, dict[str, float]]:
    """Return {name: median, 20 % and 80 % quantile in ms} of the times of `call(i)`.

    In a turn, a call is timed on sets[name] buffer sets. A call has rounds[name] turns, one per
    round, so other work on the machine affects all calls equally. All buffers are reset before each
    turn, which also evicts the first buffers from the caches. On a GPU, times are measured with
    events around the call, which is queued while the device is busy. These times exclude kernel
    launches on the host, unless the call waits for the device. Calls in `graphs` are captured in
    one CUDA graph per set and replayed. After `seconds`, no further round starts, but the first
    round always runs.
    """
    calls = calls | {name: _captured(calls[name], reset, sets[name]) for name in graphs}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    cycles: dict[str, int] = {}
    start = time.monotonic()
    for turn in range(max(rounds.values()) + 1):
        if turn > 1 and time.monotonic() - start > seconds:
            break
        for name, call in calls.items():
            if turn > rounds[name]:
                continue
            for i in range(max(sets.values())):
                reset(i)
            if turn == 0 and device == "cuda":  # the first turn warms up
                cycles[name] = _cycles_that_hide(call, reset, sets[name])
            elif device == "cuda":
                samples[name] += _on_gpu(call, sets[name], cycles[name])
            else:
                measured = list(_on_cpu(call, sets[name]))
                samples[name] += measured if turn > 0 else []
    return {name: _quantiles(values) for name, values in samples.items()}


def _on_cpu(call: Call, sets: int) -> Iterator[float]:
    for i in range(sets):
        start = time.perf_counter()
        call(i)
        yield 1e3 * (time.perf_counter() - start)


def _cycles_that_hide(call: Call, reset: Call, sets: int) -> int:
    """The number of cycles to keep the device busy until the whole call is queued."""
    for i in range(sets):
        call(i)  # compiles and loads kernels
    cycles = _SLEEP_CYCLES
    while cycles < _MOST_CYCLES:
        reset(0)
        torch.cuda.synchronize()
        start = torch.cuda.Event()
        torch.cuda._sleep(cycles)
        start.record()
        call(0)
        if not start.query():  # the device is still busy
            break
        cycles *= 2
    return cycles


def _on_gpu(call: Call, sets: int, cycles: int) -> Iterator[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(sets)]
    for i, (start, end) in enumerate(events):
        torch.cuda._sleep(cycles)
        start.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return (start.elapsed_time(end) for start, end in events)


def _captured(call: Call, reset: Call, sets: int) -> Call:
    graphs = []
    for i in range(sets):
        reset(i)
        call(i)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            call(i)
    return lambda i: graphs[i].replay()


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "q20": ordered[len(ordered) // 5],
        "q80": ordered[(4 * len(ordered)) // 5],
    }
