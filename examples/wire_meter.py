"""Wraps collectives to count the bytes that this rank sends. You can copy it into your program.

with WireMeter() as meter:
    step()
    bytes_of_first_step = meter.take()
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dct_parallel.collectives import all_gather_bytes, all_reduce_bytes


def reduce_scatter_bytes(nbytes: int, world_size: int) -> int:
    """The bytes that each rank sends in a ring reduce-scatter of `nbytes`."""
    return (world_size - 1) * nbytes // world_size


def broadcast_bytes(nbytes: int, world_size: int) -> int:
    """The mean bytes sent per rank in a broadcast: all ranks except the source receive `nbytes`."""
    return (world_size - 1) * nbytes // world_size


def _all_to_all_bytes(call: Mapping[str, Any], world_size: int) -> int:
    """The bytes sent to other ranks: all splits except the split of this rank."""
    sent: Tensor = call["input"]
    splits: list[int] | None = call["input_split_sizes"]
    if not splits:
        return (world_size - 1) * sent.nbytes // world_size
    own = splits[dist.get_rank(call["group"])]
    return (sum(splits) - own) * (sent.nbytes // sent.shape[0] if sent.shape[0] else 0)


_Counter = Callable[[Mapping[str, Any], int], int]

# {function of torch.distributed: function of (arguments, world size) that returns bytes per call}.
# Some versions of torch do not have all of these functions.
_COUNTERS: dict[str, _Counter] = {
    "all_reduce": lambda call, p: all_reduce_bytes(call["tensor"].nbytes, p),
    "all_gather": lambda call, p: all_gather_bytes(call["tensor"].nbytes, p),
    "all_gather_into_tensor": lambda call, p: all_gather_bytes(call["input_tensor"].nbytes, p),
    "all_gather_single": lambda call, p: all_gather_bytes(call["input_tensor"].nbytes, p),
    "reduce_scatter_tensor": lambda call, p: reduce_scatter_bytes(call["input"].nbytes, p),
    "reduce_scatter_single": lambda call, p: reduce_scatter_bytes(call["input"].nbytes, p),
    "all_to_all_single": _all_to_all_bytes,
    "broadcast": lambda call, p: broadcast_bytes(call["tensor"].nbytes, p),
    "isend": lambda call, p: call["tensor"].nbytes,
}


class WireMeter:
    """Counts the bytes that this rank sends through `torch.distributed`.

    While the meter is active, it replaces these functions by wrappers: all_reduce, all_gather,
    all_gather_into_tensor, all_gather_single, reduce_scatter_tensor, reduce_scatter_single,
    all_to_all_single, broadcast, send, isend and batch_isend_irecv. It counts all calls of
    `torch.distributed.<name>(...)` on any thread, including calls by dct_parallel, by torch's DDP
    hooks and by torch.distributed.pipelining. It does not count DDP's built-in all-reduce, which
    C++ code calls. To count it, register `default_hooks.allreduce_hook`. Byte counts assume ring
    algorithms. Meters can be nested; exit them in reverse order.

    Args:
        group: count only calls with this process group. By default, count all calls.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group must be a process group that contains this rank, got {group!r}")
        self._group = group
        self._lock = threading.Lock()
        self._bytes = 0
        # In a torch function mode, such as set_default_device, isend calls itself.
        self._calling = threading.local()
        self._originals: dict[str, Callable[..., Any]] = {}

    def take(self) -> int:
        """Return the bytes sent since the start or the last `take`, and reset the count to 0."""
        with self._lock:
            taken, self._bytes = self._bytes, 0
        return taken

    def __enter__(self) -> "WireMeter":
        for name, count in _COUNTERS.items():
            if hasattr(dist, name):
                self._originals[name] = getattr(dist, name)
                _replace(name, self._counting(self._originals[name], count))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            _replace(name, original)
        self._originals.clear()

    def _counting(self, collective: Callable[..., Any], count: _Counter) -> Callable[..., Any]:
        signature = inspect.signature(collective)

        @functools.wraps(collective)
        def counting(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._calling, "now", False):
                return collective(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            group = bound.arguments["group"]
            counted = self._group is None or group is self._group
            ranks = dist.get_world_size(group)
            if counted and ranks > 0:  # -1 if this rank is not in the group
                with self._lock:
                    self._bytes += count(bound.arguments, ranks)
            self._calling.now = True
            try:
                return collective(*args, **kwargs)
            finally:
                self._calling.now = False

        return counting


def _replace(name: str, function: Callable[..., Any]) -> None:
    setattr(dist, name, function)
    if name == "isend":  # `send` and P2POp use isend of distributed_c10d
        dist.distributed_c10d.isend = function
