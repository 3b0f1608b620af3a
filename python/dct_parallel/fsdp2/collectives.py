"""Quantized collectives between the shards of a module, which FSDP2 calls instead of torch's.

Not `dct_parallel.collectives`, whose functions call those of torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from dct_kernels import checks

from .._torch import (
    below_autograd,
    fsdp_divide_factor,
    fsdp_gathered_dtypes,
    fsdp_reduced_dtype,
    span,
)
from ..collectives import all_gather, all_gather_bytes
from ..exchange.results import Statuses
from .messages import MessageLayout, message_layout

if TYPE_CHECKING:
    from .units import Unit


class _Collective(Statuses, ABC):
    """Implements FSDP2's interface of collectives (`allocate` and `__call__`), and `Exchange`.

    torch's collective is used if messages would not be smaller, and for a tensor that does not
    match the layout of the unit, because it contains other parameters or is for other ranks.

    Args:
        unit: the module whose weights or gradients are sent.
        default: torch's collective.
        format: the format of messages, or None to use torch's collective.
        count: counts the bytes that this rank sends.
    """

    _trained: ClassVar[bool]  # whether messages contain only parameters that require grad
    _least_itemsize: ClassVar[int]  # of the dense collective that messages are compared with

    def __init__(
        self, unit: "Unit", default: Any, format: str | None, count: Callable[[int], None]
    ) -> None:
        self._unit, self._default, self._format, self._count = unit, default, format, count
        ranks = dist.get_process_group_ranks(unit.shard_group())
        # Not 0 for ranks that have sent a damaged message in any exchange. Unlike those of a
        # bucket, the words stay if an exchange fails: no residual is affected.
        self._status = torch.zeros(len(ranks), dtype=torch.int32, device=unit.device)
        super().__init__(self._status, ranks)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor: Tensor = self._default.allocate(size, dtype=dtype, device=device)
        return tensor

    def message_bytes(self) -> int:
        """The bytes that this rank sends to each other rank in the next exchange."""
        dtypes = self._dtypes()  # of the parameters
        if len({*dtypes}) == 1 and (layout := self._layout(dtypes[0])) is not None:
            return layout.nbytes(dtypes[0])
        parts = zip(self._unit.layout(self._trained), dtypes, strict=True)
        return sum(numel * dtype.itemsize for (numel, _), dtype in parts)

    @abstractmethod
    def _dtypes(self) -> Sequence[torch.dtype]:
        """The dtype in which torch's collective sends each parameter."""

    def _layout(self, dtype: torch.dtype) -> MessageLayout | None:
        """The layout of messages for parts of this dtype, or None to use torch's collective."""
        if self._format is None or dtype not in checks.FLOATS:
            return None
        unit = self._unit
        layout = message_layout(unit.layout(self._trained), self._format, unit.device)
        dense = layout.numel * max(dtype.itemsize, self._least_itemsize)
        return layout if len(self._ranks) > 1 and layout.nbytes(dtype) < dense else None

    def _record(self, status: Tensor) -> None:
        # In place, because FSDP2 may run exchanges on different streams. If a new tensor replaced
        # `_status`, its memory could be reused before another stream has read it.
        torch.maximum(self._status, status, out=self._status)


class WeightGather(_Collective):
    """The all-gather of the weights of a module.

    Every rank unpacks all shards from messages, including its own shard, so weights are bitwise
    equal on all ranks.
    """

    _trained, _least_itemsize = False, 1

    def _dtypes(self) -> Sequence[torch.dtype]:
        return fsdp_gathered_dtypes(self._unit.group)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        layout = self._layout(input_tensor.dtype)
        if layout is None or layout.numel != input_tensor.numel():
            self._count(all_gather_bytes(input_tensor.nbytes, group.size()))
            work: dist.Work | None = self._default(output_tensor, input_tensor, group, async_op)
            return work
        with span("dct::gather_weights"), below_autograd():
            ranks = len(self._ranks)
            message = layout.pack(input_tensor.view(1, -1))
            messages = message.new_empty(ranks, message.shape[1])
            self._count(all_gather_bytes(message.nbytes, ranks))
            all_gather(messages, message.view(-1), group)
            self._record(layout.unpack(messages, output_tensor.view(ranks, -1)))
        return None


class GradientReduceScatter(_Collective):
    """The reduce-scatter of the gradients of a module, as an all-to-all of messages.

    The owner of a shard sums the messages of all ranks in float32 (`MessageLayout.sum`). So
    messages are compared with a dense collective in float32.
    """

    _trained, _least_itemsize = True, 4

    def _dtypes(self) -> Sequence[torch.dtype]:
        dtype = fsdp_reduced_dtype(self._unit.group)
        return [] if dtype is None else [dtype] * len(self._unit.layout(trained=True))

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        layout = self._layout(output_tensor.dtype)
        if layout is None or layout.numel != output_tensor.numel():
            self._count(all_gather_bytes(output_tensor.nbytes, group.size()))
            work: dist.Work | None = self._default(output_tensor, input_tensor, group, op, async_op)
            return work
        with span("dct::reduce_gradients"), below_autograd():
            ranks = len(self._ranks)
            messages = layout.pack(input_tensor.view(ranks, -1))
            received = torch.empty_like(messages)
            self._count(all_gather_bytes(messages.shape[1], ranks))
            dist.all_to_all_single(received, messages, group=group)
            self._record(layout.sum(received, output_tensor, self._scale(op)))
        return None

    def _scale(self, op: ReduceOp | ReduceOp.RedOpType) -> float:
        if op == ReduceOp.SUM:
            return 1.0
        if op == ReduceOp.AVG:
            return 1 / len(self._ranks)
        return 1 / (fsdp_divide_factor(self._unit.group) or 1)  # with PREMUL_SUM
