"""An all-reduce of one tensor in few bits, for training loops without a hook."""

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from dct_kernels import checks

from ..formats import require_format
from ..groups import exchange, require_group, require_same, timeout_of
from .bucket import Bucket, StepResults, run_now
from .plan import plan_bucket
from .settings import FORMATS, Settings

_OP = "all_reduce_compressed"


class CompressedWork:
    """An all-reduce under way, as torch's Work: call `wait`."""

    def __init__(
        self, bucket: Bucket, tensor: Tensor, residual: Tensor | None, scale: Tensor | None
    ) -> None:
        self._bucket, self._scale = bucket, scale
        self._flat, self._keeps = tensor.view(-1), residual is not None
        if residual is not None:
            bucket.codec.residual = residual.view(-1)
        self._under_way, self._error = True, ""
        with self._returning():
            bucket.start(self._flat)

    @torch.no_grad()
    def wait(self) -> bool:
        """Write the result into the tensor. Waits for the device. True, as torch's.

        Raises:
            RuntimeError: see `all_reduce_compressed`.
        """
        if self._under_way:
            self._under_way = False
            with self._returning():
                self._bucket.finish(self._flat, self._scale)
            if self._keeps:
                self._bucket.merge_owned()
            damaged = StepResults({0: self._bucket}, run_now).read()[0].damaged
            if damaged:
                got = "; ".join(damaged)
                self._error = f"dct::{_OP}: every payload must be intact, got {got}"
        if self._error:
            raise RuntimeError(self._error)
        return True

    @contextlib.contextmanager
    def _returning(self) -> Iterator[None]:
        """What was sent returns to the residual where an exchange fails."""
        try:
            yield
        except BaseException as error:
            self._error = f"dct::{_OP}: the exchange must succeed, got {error!r}"
            if self._keeps:
                self._bucket.take_back()
            raise


@checks.names_keywords
@torch.no_grad()
def all_reduce_compressed(
    tensor: Tensor,
    residual: Tensor | None = None,
    *,
    format: str | torch.dtype,
    op: Any = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> CompressedWork | None:
    """`torch.distributed.all_reduce` with every entry in few bits. In place.

        residual = torch.zeros_like(tensor, dtype=torch.float32)  # kept from step to step
        all_reduce_compressed(tensor, residual, format="int4", op=dist.ReduceOp.AVG)

    What rounding leaves of tensor + residual is the next residual, and is sent with the next tensor
    (error feedback; ours, after DCT's hook). The result is summed in rank order in float32: the
    same bits on every rank, and deterministic. One all-gather, or from three ranks on, where that
    sends fewer bytes, an all-to-all and an all-gather: what the second rounding leaves is added to
    the residual of the rank that rounds. Allocates the messages, and 4 bytes per entry: the hooks
    of this package keep these from step to step, and overlap backward.

    Args:
        tensor: float32, bfloat16 or float16, contiguous, of any shape, on the CPU or CUDA; the same
            number of entries and dtype on every rank. Holds the result afterwards.
        residual: float32, of the tensor's shape and device, contiguous; zeros at first, one for
            each tensor that is reduced again and again. Mutated. None: no error feedback.
        format: of what is sent, the same on every rank: "int8", "int4" or "ternary", or
            "bfloat16" or "float32" (of which nothing is left).
        op: ReduceOp.SUM, which is AVG times the number of ranks and rounded as such, or
            ReduceOp.AVG; the same on every rank.
        group: ranks to reduce over, this one among them; default all.
        async_op: return at once; the tensor holds the result after `wait`. Before that neither it
            nor the residual may be touched. Every rank waits for all, in the same order: the second
            collective begins in `wait`, and tensors of one size in another order are not noticed.

    Returns:
        None, or with `async_op` an object with `wait()`.

    Raises:
        ValueError, TypeError: an argument is out of its range on this rank; nothing has changed.
            The other ranks wait until the group's timeout, as in torch's own.
        ValueError: ranks differ in size, dtype, format or op; nothing has changed. They compare a
            combination the first time that they have it, through the group's store.
        RuntimeError: only some ranks have a combination for the first time; at the group's timeout.
        RuntimeError: from the collective, if a rank is gone: the residual has back what was sent,
            and holds tensor + residual. Or this rank received a damaged message: then the tensor is
            not the sum, and what was sent is in no residual. NaN and Inf raise nothing: in few bits
            the 64 entries around them are NaN on every rank; this rank's residual is kept there.
    """
    settings = Settings.checked(_OP, 1.0, require_format(_OP, "format", format, FORMATS))
    _require(tensor, residual)
    checks.require_type(_OP, "op", op, (ReduceOp, ReduceOp.RedOpType), "a ReduceOp")
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        checks.fail(_OP, "op", "ReduceOp.SUM or ReduceOp.AVG", op)
    checks.require_type(_OP, "async_op", async_op, bool, "a bool")
    group = require_group(_OP, group)
    ranks, device = group.size(), tensor.device
    values = {"numel": tensor.numel(), "dtype": str(tensor.dtype), "op": str(op)}
    _compare({**values, "format": settings.format}, group, device)
    plan = plan_bucket(["tensor"], [tensor.numel()], settings, ranks)
    bucket = Bucket(plan, group, device, 0, {})
    scale = None
    if op == ReduceOp.SUM:
        scale = torch.full((1,), ranks, dtype=torch.float32, device=device)
    work = CompressedWork(bucket, tensor, residual, scale)
    if async_op:
        return work
    work.wait()
    return None


# {group: what its ranks have compared}
_compared: WeakKeyDictionary[dist.ProcessGroup, set[tuple[Any, ...]]] = WeakKeyDictionary()


def _compare(values: dict[str, Any], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise on every rank if `values` differ; compared the first time that this rank has them."""
    known = _compared.setdefault(group, set())
    if tuple(values.values()) not in known:
        require_same(_OP, exchange(_OP, values, group, timeout_of(group, device)))
        known.add(tuple(values.values()))


def _require(tensor: Tensor, residual: Tensor | None) -> None:
    checks.require_type(_OP, "tensor", tensor, Tensor, "a tensor")
    for name, given in {"tensor": tensor, "residual": residual}.items():
        if type(given) not in (Tensor, nn.Parameter, type(None)) and isinstance(given, Tensor):
            raise TypeError(
                f"dct::{_OP}: {name} must be a plain tensor (of a DTensor, its to_local()), got "
                f"{type(given).__name__}"
            )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"dct::{_OP}: tensor must be on the CPU or CUDA, got {tensor.device}")
    checks.require_tensor(_OP, "tensor", tensor, checks.FLOATS, (tensor.dim(),))
    if residual is None:
        return
    like, shape = ("tensor", tensor), list(tensor.shape)
    checks.require_type(_OP, "residual", residual, Tensor, "a tensor or None")
    if residual.shape != tensor.shape:
        raise ValueError(
            f"dct::{_OP}: residual must have shape {shape}, as the tensor, got "
            f"{list(residual.shape)}"
        )
    checks.require_tensor(_OP, "residual", residual, (torch.float32,), (len(shape),), like)
    checks.memory(_OP, {"tensor": tensor, "residual": residual}, {})
