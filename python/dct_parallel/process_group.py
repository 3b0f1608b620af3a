"""A process group that compresses reductions, for frameworks without hooks.

    import dct_parallel.process_group  # registers the name "dct"

    dct_parallel.process_group.configure(format="int8")  # optional, before init
    torch.distributed.init_process_group("dct")

The group sends large floating-point all-reduces and reduce-scatters in a quantized format. All
other collectives go to gloo, and on CUDA to NCCL, unchanged. docs/guide/process_group.md says when
a hook is the better choice.
"""

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.futures import Future

from dct_kernels import __version__, checks

from ._torch import group_of_backends
from .exchange.executors import Executor, executor_for
from .exchange.quantized_collectives import exchange
from .exchange.results import StepResults, run_now
from .formats import require_format
from .groups import destroyer, require_same, separate_group, timeout_of
from .user_warnings import logger

NAME = "dct"
FORMATS = ("int8", "int4", "bfloat16")


class _Settings(NamedTuple):
    """The arguments of `configure`."""

    format: str = "int8"
    min_bytes: float = 1 << 20
    gathers: str | None = None
    groups: Callable[[tuple[int, ...]], object] | None = None


_settings = _Settings()
_lock = threading.Lock()  # for the two variables below
_exact_depth = 0
_stats: dict[str, dict[str, int]] = {}


@checks.names_keywords
def configure(
    *,
    format: str | torch.dtype = "int8",
    min_bytes: float = 1 << 20,
    gathers: str | None = None,
    groups: Callable[[tuple[int, ...]], object] | None = None,
) -> None:
    """Set the settings of the process groups that are created afterwards, on every rank.

    Args:
        format: the format of reductions: "int8", "int4" or "bfloat16" (with float32 sums).
        min_bytes: smaller tensors are sent unchanged. `math.inf` compresses nothing. The size of a
            reduce-scatter is that of its input, and the size of an all-gather that of its output.
        gathers: "int8" also compresses all-gathers, or None. Frameworks gather weights and
            checkpoints with them.
        groups: a function that returns whether the group of a tuple of global ranks compresses; the
            same on all ranks. By default, only groups of all ranks compress.

    Raises:
        ValueError, TypeError: an argument is out of range. The settings have not changed.
    """
    global _settings
    op = "process_group.configure"
    format = require_format(op, "format", format, FORMATS)
    checks.require_type(op, "min_bytes", min_bytes, (int, float), "a number")
    if not min_bytes >= 0:
        checks.fail(op, "min_bytes", ">= 0", min_bytes)
    if gathers not in (None, "int8"):
        checks.fail(op, "gathers", "None or 'int8'", repr(gathers))
    if groups is not None and not callable(groups):
        rule = "a function of a tuple of ranks, or None"
        checks.fail(op, "groups", rule, type(groups).__name__, TypeError)
    _settings = _Settings(format, min_bytes, gathers, groups)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Compress nothing inside this context, on any thread. All ranks must enter and leave it."""
    global _exact_depth
    with _lock:
        _exact_depth += 1
    try:
        yield
    finally:
        with _lock:
            _exact_depth -= 1


def stats() -> dict[str, dict[str, int]]:
    """Return the compressed calls of this process, {collective: figures}.

    The collectives are "all_reduce", "reduce_scatter" and "all_gather". The figures are the number
    of tensors ("calls"), the bytes that this rank sent ("sent_bytes"), and the bytes that it would
    have sent in a ring without compression ("dense_bytes").
    """
    with _lock:
        return {name: dict(figures) for name, figures in _stats.items()}


class _Work(dist.Work):
    """The handle of compressed collectives."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the result, on CUDA with the current stream. Raises errors of the exchange."""
        if timeout:
            done = threading.Event()
            self._future.add_done_callback(lambda _: done.set())
            if not done.wait(timeout.total_seconds()):
                rule = f"be complete within {timeout.total_seconds():g} s"
                raise RuntimeError(f"dct::wait: the collective must {rule}, got no result")
        self._future.wait()
        return True

    def get_future(self) -> Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        try:
            self._future.value() if self.is_completed() else None
        except Exception as error:
            return error
        return None

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize


class _Call(NamedTuple):
    """A compressed collective of one tensor. See `quantized_collectives.exchange`."""

    collective: str
    format: str
    op: Any
    part: Tensor
    parts: Sequence[Tensor]


def _method(collective: str, name: str) -> Any:
    """A method of `DCTProcessGroup` that overrides the method `name` of a process group."""

    def method(group: "DCTProcessGroup", *args: Any, **options: Any) -> Any:
        dense = getattr(group._dense, name)
        # The tensors of an all-reduce are both outputs and inputs.
        count = 1 if collective == "all_reduce" else 2
        if not group.compresses() or len(args) < count:
            return dense(*args, **options)
        outputs, inputs = ([x] if isinstance(x, Tensor) else x for x in (args[0], args[count - 1]))
        given = args[count] if len(args) > count else options.get("opts", options.get("op"))
        op = ReduceOp.SUM if given is None else getattr(given, "reduceOp", given)
        op = getattr(op, "op", op)  # RedOpType, whose values are equal only to each other
        pairs = list(zip(outputs, inputs, strict=False))
        calls = [group._call(collective, output, tensor, op) for output, tensor in pairs]
        if not any(calls) or len(outputs) != len(inputs):
            return dense(*args, **options)
        rest = [pair[:count] for pair, call in zip(pairs, calls, strict=True) if call is None]
        lists = map(list, zip(*rest, strict=True))
        others = dense(*lists, *args[count:], **options) if rest else None
        return group._submit([call for call in calls if call is not None], others, outputs)

    return method


# Without these attributes, torch would hold the GIL while it adds the call to gloo's queue. gloo's
# threads wait for the GIL while they hold the lock of the queue, so ranks could hang. These are all
# collectives of torch's PyProcessGroup.hpp that this class does not change, up to torch 2.14.
_UNCHANGED = ["broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv"]
_UNCHANGED += ["recv_anysource", "alltoall", "alltoall_base", "all_to_all_single"]


class DCTProcessGroup(dist.ProcessGroup):
    """The process group of the backend "dct".

    `_dense` has the same backends, and runs everything that is sent unchanged. Compressed calls run
    in the order in which they were issued, in a process group of their own, because the second
    collective of a call starts after the caller may have issued others.
    """

    def __init__(self, options: Any, nccl_options: Any, settings: _Settings | None) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._store, self._settings = options.store, settings
        self._dense, self._backends = group_of_backends(self, options, nccl_options)
        for name in _UNCHANGED:
            if hasattr(self._dense, name):  # a partial, because Dynamo would trace a function
                setattr(self, name, partial(getattr(self._dense, name)))
        self._inner: dist.ProcessGroup | None = None  # created by the first compressed call
        # For each device type, an executor and the results that the host has not read.
        self._pending: dict[str, tuple[Executor, deque[tuple[str, StepResults]]]] = {}
        self._coalescing = False

    def getBackendName(self) -> str:
        return NAME

    def get_group_store(self) -> dist.Store:
        store: dist.Store = self._store  # torch's constructor with a store cannot be subclassed
        return store

    allreduce = _method("all_reduce", "allreduce")
    allreduce_coalesced = _method("all_reduce", "allreduce_coalesced")
    reduce_scatter = _method("reduce_scatter", "reduce_scatter")
    reduce_scatter_single = _method("reduce_scatter", "reduce_scatter_single")
    reduce_scatter_single_coalesced = _method("reduce_scatter", "reduce_scatter_single_coalesced")
    allgather = _method("all_gather", "allgather")
    all_gather_single = _method("all_gather", "all_gather_single")
    all_gather_single_coalesced = _method("all_gather", "all_gather_single_coalesced")
    # The names before torch 2.13.
    _reduce_scatter_base = _method("reduce_scatter", "_reduce_scatter_base")
    reduce_scatter_tensor_coalesced = _method("reduce_scatter", "reduce_scatter_tensor_coalesced")
    _allgather_base = _method("all_gather", "_allgather_base")
    allgather_into_tensor_coalesced = _method("all_gather", "allgather_into_tensor_coalesced")

    def _start_coalescing(self, device: torch.device) -> None:
        self._dense._start_coalescing(device)
        self._coalescing = True  # NCCL's coalescing would not wait for compressed calls

    def _end_coalescing(self, device: torch.device) -> Any:
        self._coalescing = False
        return self._dense._end_coalescing(device)

    def shutdown(self) -> None:
        for executor, _ in self._pending.values():
            executor.close()
        if self._inner is not None:
            self._destroy()
        super().shutdown()

    def abort(self) -> None:
        if self._inner is not None:
            self._inner.abort()
        super().abort()

    def compresses(self) -> bool:
        """Whether this group compresses at present."""
        return self._settings is not None and not _exact_depth and not self._coalescing

    def _call(self, collective: str, output: Any, given: Any, op: Any) -> _Call | None:
        """The compressed collective of one tensor, or None to send the tensor unchanged."""
        assert self._settings is not None
        format, min_bytes, gathers, _ = self._settings
        part, parts, ranks = output, given, self.size()
        if collective == "all_gather":
            part, parts, format, op = given, output, gathers or "", ReduceOp.SUM
        elif collective == "all_reduce":
            ranks = 1
        tensors = [parts] if isinstance(parts, Tensor) else parts
        numels = [tensor.numel() for tensor in tensors]
        compresses = (
            format
            and op in (ReduceOp.SUM, ReduceOp.AVG)
            and sum(numels) * part.itemsize >= max(min_bytes, 1)
            and part.dtype in checks.FLOATS
            and part.device.type in ("cpu", "cuda")
            # Otherwise the parts differ in size, or torch raises an error.
            and len({*numels}) == 1
            and sum(numels) == ranks * part.numel()
            and all(
                type(tensor) in (Tensor, nn.Parameter)
                and (tensor.dtype, tensor.device) == (part.dtype, part.device)
                and tensor.layout == torch.strided
                and tensor.is_contiguous()
                for tensor in (part, *tensors)
            )
        )
        return _Call(collective, format, op, part, tensors) if compresses else None

    def _submit(self, calls: Sequence[_Call], others: dist.Work | None, result: Any) -> _Work:
        """Run compressed calls after all earlier ones. `others` also belongs to the result."""
        assert self._settings is not None
        settings, device = self._settings, calls[0].part.device
        if self._inner is None:
            timeout, ranks = timeout_of(self, device), dist.get_process_group_ranks(self)
            self._inner = separate_group(self, "compressed", timeout, self._backends)
            self._destroy = destroyer(self, self._inner)
            text = "dct: the group of ranks %s compresses collectives of at least %s bytes in %s"
            logger.info(text, ranks, settings.min_bytes, settings.format)
        if device.type not in self._pending:
            self._pending[device.type] = executor_for(device, sends_once=False), deque()
        (executor, unread), group = self._pending[device.type], self._inner

        def run() -> Any:
            for call in calls:
                done, dense_bytes, sent_bytes = exchange(*call, group)
                if device.type == "cuda":  # the caller may free these before the stream reads them
                    for tensor in (call.part, *call.parts):
                        tensor.record_stream(torch.cuda.current_stream(device))
                unread.append((call.collective, StepResults({"": done}, run_now)))
                _count(call.collective, dense_bytes, sent_bytes)
            if others is not None:
                others.wait()
            _raise_if_damaged(unread)
            return result

        future: Any = executor.run_after(run)
        return _Work(future)


def _raise_if_damaged(unread: deque[tuple[str, StepResults]]) -> None:
    """Raise an error if a call received a damaged message. Does not wait for CUDA."""
    while unread and unread[0][1].has_arrived():
        name, results = unread.popleft()
        if damaged := results.read()[""].damaged:
            rule, got = "every payload must be intact", "; ".join(damaged)
            raise RuntimeError(f"dct::{name}: {rule}, got {got}")


def _count(collective: str, dense_bytes: int, sent_bytes: int) -> None:
    with _lock:
        total = _stats.setdefault(collective, {"calls": 0, "dense_bytes": 0, "sent_bytes": 0})
        total["calls"] += 1
        total["dense_bytes"] += dense_bytes
        total["sent_bytes"] += sent_bytes


def _create(options: Any, nccl_options: Any) -> DCTProcessGroup:
    """Create a group. torch calls this function on each rank of the group."""
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    is_world = not dist.is_initialized() or len(ranks) == dist.get_world_size()
    groups = _settings.groups
    compresses = len(ranks) > 1 and bool(groups(tuple(ranks)) if groups else is_world)
    values = {"version": __version__, "compresses": compresses, **_settings._asdict()}
    del values["groups"]
    # The group is not registered yet, so `groups.compare` cannot compare these values.
    options.store.set(f"dct/{options.group_rank}", json.dumps(values))
    answers = {r: json.loads(options.store.get(f"dct/{i}")) for i, r in enumerate(ranks)}
    require_same("init_process_group", answers)
    if not compresses:
        text = "dct: the group of ranks %s compresses nothing; see process_group.configure(groups=)"
        logger.info(text, ranks)
    return DCTProcessGroup(options, nccl_options, _settings if compresses else None)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
