"""A quantized all-reduce of one tensor, for training loops without a hook."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from dct_kernels import checks

from ..formats import require_format
from ..groups import compare, require_group
from .bucket import Bucket
from .plan import plan_bucket
from .results import StepResults, run_now
from .settings import FORMATS, Settings

_OP = "all_reduce_compressed"


class CompressedWork:
    """The handle of a pending all-reduce. Like the Work object of torch, it has `wait`."""

    def __init__(
        self, bucket: Bucket, tensor: Tensor, residual: Tensor | None, scale: Tensor | None
    ) -> None:
        self._bucket, self._scale = bucket, scale
        self._flat, self._has_residual = tensor.view(-1), residual is not None
        if residual is not None:
            bucket.codec.residual = residual.view(-1)
        self._pending, self._error = True, ""
        with self._restoring_residual():
            bucket.start(self._flat)

    @torch.no_grad()
    def wait(self) -> bool:
        """Write the result into the tensor, and wait for the device. Returns True, like torch."""
        if self._pending:
            self._pending = False
            with self._restoring_residual():
                self._bucket.finish(self._flat, self._scale)
            if self._has_residual:
                self._bucket.merge_owned()
            damaged = StepResults({"": self._bucket}, run_now).read()[""].damaged
            if damaged:
                self._error = f"dct::{_OP}: every payload must be intact, got {'; '.join(damaged)}"
        if self._error:
            raise RuntimeError(self._error)
        return True

    @contextlib.contextmanager
    def _restoring_residual(self) -> Iterator[None]:
        """If the exchange raises an error, return the sent entries to the residual."""
        try:
            yield
        except BaseException as error:
            self._error = f"dct::{_OP}: the exchange must succeed, got {error!r}"
            if self._has_residual:
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
    """Reduce a tensor in place like `torch.distributed.all_reduce`, in a quantized format.

        residual = torch.zeros_like(tensor, dtype=torch.float32)  # kept from step to step
        all_reduce_compressed(tensor, residual, format="int4", op=dist.ReduceOp.AVG)

    The rounding error of tensor + residual becomes the new residual (error feedback, as in
    `dct_hook`). The result is deterministic and bitwise the same on every rank, because ranks sum
    in float32 in rank order. The call uses one all-gather. With three or more ranks, it instead
    uses an all-to-all and an all-gather if this sends fewer bytes. Each rank then also rounds its
    range of the mean, and adds the error to its residual. Allocates messages and, if there is a
    residual, 4 bytes per entry.

    Args:
        tensor: float32, bfloat16 or float16, contiguous, any shape, on the CPU or CUDA. All ranks
            have the same dtype and number of entries. Overwritten with the result.
        residual: float32, contiguous, with the tensor's shape and device; mutated. Pass zeros in
            the first call, and keep one residual for each tensor. None: no error feedback.
        format: "int8", "int4", "ternary", "bfloat16" or "float32" (without a rounding error); the
            same on every rank.
        op: ReduceOp.AVG, or ReduceOp.SUM, which is computed as AVG times the number of ranks.
        group: the ranks to reduce over, including this one; default: all.
        async_op: return immediately. Do not use `tensor` and `residual` before `wait` returns.
            Every rank must call `wait` for all tensors in the same order. If the order of
            equal-sized tensors differs, the error is not detected.

    Returns:
        None, or with `async_op` an object with `wait()`.

    Raises:
        ValueError, TypeError: an argument is out of range on this rank. Nothing has changed. The
            other ranks wait until the group's timeout, as in torch.
        ValueError: ranks differ in size, dtype, format or op. Nothing has changed. Ranks compare
            each new combination through the group's store.
        RuntimeError: the group's timeout passed, because the combination is new on some ranks only.
        RuntimeError: the collective failed. `residual` now holds tensor + residual.
        RuntimeError: this rank received a damaged message. The tensor is wrong, and the sent
            entries are lost.

    NaN and Inf raise no error. In quantized formats, the whole group of 64 entries that contains a
    NaN or Inf becomes NaN on every rank. The residual of the rank with the NaN or Inf keeps the old
    values of the group.
    """
    settings = Settings.checked(_OP, 1.0, require_format(_OP, "format", format, FORMATS))
    _require(tensor, residual)
    checks.require_type(_OP, "op", op, (ReduceOp, ReduceOp.RedOpType), "a ReduceOp")
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        checks.fail(_OP, "op", "ReduceOp.SUM or ReduceOp.AVG", op)
    checks.require_type(_OP, "async_op", async_op, bool, "a bool")
    group = require_group(_OP, group)
    values = {"numel": tensor.numel(), "dtype": str(tensor.dtype), "op": str(op)}
    _compare({**values, "format": settings.format}, group, tensor.device)
    settings = dataclasses.replace(settings, has_residual=residual is not None)
    bucket, scale = tensor_bucket(tensor, settings, op, group)
    work = CompressedWork(bucket, tensor, residual, scale)
    if async_op:
        return work
    work.wait()
    return None


def tensor_bucket(
    tensor: Tensor, settings: Settings, op: Any, group: dist.ProcessGroup
) -> tuple[Bucket, Tensor | None]:
    """Return a bucket for one tensor, and the scale that turns its mean into the result of `op`."""
    plan = plan_bucket(["tensor"], [tensor.numel()], settings, group.size())
    scale = None
    if op == ReduceOp.SUM:
        scale = torch.full((1,), group.size(), dtype=torch.float32, device=tensor.device)
    return Bucket(plan, group, tensor.device, 0, {}), scale


# {group: the combinations of values that this rank has compared with the other ranks}
_compared: WeakKeyDictionary[dist.ProcessGroup, set[tuple[Any, ...]]] = WeakKeyDictionary()


def _compare(values: dict[str, Any], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise on every rank if `values` differ. Return if this rank has compared equal values."""
    known = _compared.setdefault(group, set())
    if tuple(values.values()) not in known:
        compare(_OP, values, group, device)
        known.add(tuple(values.values()))


def _require(tensor: Tensor, residual: Tensor | None) -> None:
    checks.require_type(_OP, "tensor", tensor, Tensor, "a tensor")
    for name, given in {"tensor": tensor, "residual": residual}.items():
        if type(given) not in (Tensor, nn.Parameter, type(None)) and isinstance(given, Tensor):
            rule = "a plain tensor (for a DTensor, pass to_local())"
            checks.fail(_OP, name, rule, type(given).__name__, TypeError)
    if tensor.device.type not in ("cpu", "cuda"):
        checks.fail(_OP, "tensor", "on the CPU or CUDA", tensor.device)
    checks.require_tensor(_OP, "tensor", tensor, checks.FLOATS, (tensor.dim(),))
    if residual is None:
        return
    like, shape = ("tensor", tensor), list(tensor.shape)
    checks.require_type(_OP, "residual", residual, Tensor, "a tensor or None")
    if residual.shape != tensor.shape:
        rule = f"shape {shape}, like tensor"
        checks.fail(_OP, "residual", rule, list(residual.shape), verb="have")
    checks.require_tensor(_OP, "residual", residual, (torch.float32,), (len(shape),), like)
    checks.memory(_OP, {"tensor": tensor, "residual": residual}, {})
