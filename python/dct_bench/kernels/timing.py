"""Times of calls that take turns, each on buffers that no cache holds any more."""

import statistics
import time
from collections.abc import Callable, Collection, Iterator

import torch

_SLEEP_CYCLES = 200_000  # some 0.1 ms: the host is ahead by then, and its gaps are not measured

Call = Callable[[int], object]


def take_turns(
    calls: dict[str, Call],
    reset: Call,
    sets: int,
    rounds: dict[str, int],
    device: str,
    graphs: Collection[str] = (),
) -> dict[str, dict[str, float]]:
    """{name: median, 20 % and 80 % quantile in ms} of `call(i)` on the buffer sets i in turn.

    Every call has its turn in every round, so that what else the machine does hits all alike. The
    buffers are reset before each turn, all of them, which also sends the first out of the caches.
    On the GPU time is between events around the call, queued while the device is kept busy: what
    the device takes, without the host's launches, unless a call itself waits for the device. Calls
    named in `graphs` are captured in a CUDA graph for every set, and replayed.
    """
    calls = calls | {name: _captured(calls[name], reset, sets) for name in graphs}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(max(rounds.values()) + 1):
        for name, call in calls.items():
            if turn > rounds[name]:
                continue
            for i in range(sets):
                reset(i)
            measured = list((_on_gpu if device == "cuda" else _on_cpu)(call, sets))
            if turn > 0:  # the first warms up
                samples[name] += measured
    return {name: _quantiles(values) for name, values in samples.items()}


def _on_cpu(call: Call, sets: int) -> Iterator[float]:
    for i in range(sets):
        start = time.perf_counter()
        call(i)
        yield 1e3 * (time.perf_counter() - start)


def _on_gpu(call: Call, sets: int) -> Iterator[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(sets)]
    for i, (start, end) in enumerate(events):
        torch.cuda._sleep(_SLEEP_CYCLES)
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
