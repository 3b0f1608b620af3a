"""Quantized collectives between the shards of a module, which FSDP2 calls instead of torch's."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from dct_kernels import checks

from .._torch import fsdp_divide_factor, fsdp_gathered_dtypes, fsdp_reduced_dtype, span
from ..collectives import all_gather, all_gather_bytes
from .messages import MessageLayout, message_layout

if TYPE_CHECKING:
    from .units import Unit


class _Collective:
    """Implements the interface of FSDP2's collectives: `allocate` and `__call__`.

    torch's collective is used if messages would not be smaller, and for a tensor that does not
    match the layout of the unit.

    Args:
        unit: the module whose weights or gradients are sent.
        format: the format of messages, or None to use torch's collective.
        count: counts the bytes that this rank sends.
    """

    _trained: ClassVar[bool]  # whether messages contain only parameters that require grad
    _least_itemsize: ClassVar[int]  # of the dense collective that messages are compared with

    def __init__(
        self, unit: "Unit", default: Any, format: str | None, count: Callable[[int], None]
    ) -> None:
        self._unit, self._default, self._format, self._count = unit, default, format, count
        self._ranks = dist.get_process_group_ranks(unit.shard_group())
        # int32 [number of ranks], not 0 for ranks that have sent a damaged message.
        self._status: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor: Tensor = self._default.allocate(size, dtype=dtype, device=device)
        return tensor

    def _layout(self, dtype: torch.dtype | None) -> MessageLayout | None:
        """The layout of messages for parts of this dtype, or None to use torch's collective."""
        parameters = self._unit.layout(self._trained)
        if self._format is None or not parameters or dtype not in checks.FLOATS:
            return None
        layout = message_layout(parameters, self._format)
        dense = layout.numel * max(dtype.itemsize, self._least_itemsize)
        is_smaller = len(self._ranks) > 1 and layout.nbytes(dtype) < dense
        return layout if is_smaller else None

    def _layout_of(self, part: Tensor) -> MessageLayout | None:
        """The layout, or None if `part` contains other parameters or is for a different group."""
        layout = self._layout(part.dtype)
        return layout if layout is not None and part.numel() == layout.numel else None

    def _record(self, status: Tensor) -> None:
        self._status = status if self._status is None else self._status.maximum(status)


class WeightGather(_Collective):
    """The all-gather of the weights of a module.

    Every rank unpacks all shards from messages, including its own shard, so weights are bitwise
    equal on all ranks.
    """

    _trained, _least_itemsize = False, 1

    def message_bytes(self) -> int:
        """The bytes that each rank contributes to the next gather."""
        dtypes = fsdp_gathered_dtypes(self._unit.group)
        if (layout := self._layout(dtypes[0])) is not None and len({*dtypes}) == 1:
            return layout.nbytes(dtypes[0])
        parts = zip(self._unit.layout(), dtypes, strict=True)
        return sum(numel * dtype.itemsize for (numel, _), dtype in parts)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        layout, dtype = self._layout_of(input_tensor), input_tensor.dtype
        if layout is None:
            self._count(all_gather_bytes(input_tensor.nbytes, group.size()))
            work: dist.Work | None = self._default(output_tensor, input_tensor, group, async_op)
            return work
        with span("dct::gather_weights"):
            message = input_tensor.new_zeros(layout.nbytes(dtype), dtype=torch.uint8)
            layout.pack(input_tensor, message, dtype)
            messages = message.new_empty(len(self._ranks), len(message))
            self._count(all_gather_bytes(len(message), len(self._ranks)))
            all_gather(messages, message, group)
            shards = zip(messages.split(1), output_tensor.view(len(self._ranks), -1), strict=True)
            self._record(torch.cat([layout.unpack(*shard, dtype) for shard in shards]))
        return None


class GradientReduceScatter(_Collective):
    """The reduce-scatter of the gradients of a module, as an all-to-all of messages.

    The owner of a shard sums the messages of all ranks in rank order, in float32. So messages are
    compared with a dense collective in float32.
    """

    _trained, _least_itemsize = True, 4

    def message_bytes(self) -> int:
        """The bytes that each rank sends to each owner in the next reduction."""
        dtype = fsdp_reduced_dtype(self._unit.group)
        if dtype is None:
            return 0
        if (layout := self._layout(dtype)) is not None:
            return layout.nbytes(dtype)
        return sum(numel for numel, _ in self._unit.layout(trained=True)) * dtype.itemsize

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        layout, dtype = self._layout_of(output_tensor), input_tensor.dtype
        if layout is None:
            self._count(all_gather_bytes(output_tensor.nbytes, group.size()))
            work: dist.Work | None = self._default(output_tensor, input_tensor, group, op, async_op)
            return work
        with span("dct::reduce_gradients"):
            ranks = len(self._ranks)
            messages = input_tensor.new_zeros(ranks, layout.nbytes(dtype), dtype=torch.uint8)
            for part, message in zip(input_tensor.view(ranks, -1), messages, strict=True):
                layout.pack(part, message, dtype)
            received = torch.empty_like(messages)
            self._count(all_gather_bytes(messages.shape[1], ranks))
            dist.all_to_all_single(received, messages, group=group)
            self._record(layout.unpack(received, output_tensor, dtype, self._scale(op)))
        return None

    def _scale(self, op: ReduceOp | ReduceOp.RedOpType) -> float:
        if op == ReduceOp.SUM:
            return 1.0
        factor = fsdp_divide_factor(self._unit.group)  # with PREMUL_SUM
        if op == ReduceOp.AVG:
            factor = len(self._ranks)
        return 1 / (factor or 1)
