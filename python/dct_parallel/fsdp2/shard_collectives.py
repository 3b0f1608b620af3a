"""Quantized collectives between the shards of a module, which FSDP2 calls instead of torch's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from dct_kernels import checks

from .._torch import NO_PASS, backward_pass, span
from ..collectives import all_gather, all_gather_bytes
from .messages import MessageLayout

Count = Callable[[int], None]  # counts the bytes that this rank sends


class _Collective:
    """Implements the interface of FSDP2's collectives: `allocate` and `__call__`.

    Args:
        group: the ranks that hold the shards.
        layout: returns the layout of messages, or None.
        default: torch's collective, used if the layout does not match the tensor.
        count: counts the bytes that this rank sends.

    Attributes:
        status: int32 [number of ranks], not 0 for ranks that sent a damaged message. None before
            the first message.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        layout: Callable[[], MessageLayout | None],
        default: Any,
        count: Count,
    ) -> None:
        self._layout, self._default, self._count = layout, default, count
        self._ranks, self._rank = group.size(), group.rank()
        self.status: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor: Tensor = self._default.allocate(size, dtype=dtype, device=device)
        return tensor

    def layout_for(self, dtype: torch.dtype | None) -> MessageLayout | None:
        """The layout for a part of this dtype, or None to use torch's collective."""
        layout = self._layout() if self._ranks > 1 and dtype in checks.FLOATS else None
        if layout is None or dtype is None:
            return None
        return layout if layout.nbytes(dtype) < layout.numel * self._itemsize(dtype) else None

    def _matching_layout(self, part: Tensor) -> MessageLayout | None:
        """The layout, or None if `part` contains other parameters or has a different group."""
        layout = self.layout_for(part.dtype)
        return layout if layout is not None and part.numel() == layout.numel else None

    @staticmethod
    def _itemsize(dtype: torch.dtype) -> int:
        """Bytes per element of the dense collective. Messages must be smaller."""
        return dtype.itemsize

    def _record(self, status: Tensor) -> None:
        self.status = status if self.status is None else self.status.maximum(status)


class WeightGather(_Collective):
    """The all-gather of the weights of a module.

    Every rank unpacks all shards from messages, including its own shard, so weights are bitwise
    equal on all ranks. With "int4", a message contains the change since the last gather, and every
    rank adds this change to the weights that it keeps. The rounding error becomes part of the next
    change. If the weights of a rank have not changed, the rank sends zeros. So all gathers between
    two optimizer steps are bitwise equal, in training and in evaluation.

    Attributes:
        kept: [P * numel], the weights of the last gather, with "int4".
        resumed: this rank's part of the loaded kept weights, until the first gather.
    """

    kept: Tensor | None = None
    resumed: Tensor | None = None
    _sent: Tensor | None = None  # this rank's unrounded weights when it last sent their change

    def restart(self, resumed: Tensor | None = None) -> None:
        """Discard the kept weights. The next gather uses `resumed` or sends whole weights."""
        self.kept, self._sent, self.resumed = None, None, resumed

    def kept_part(self) -> Tensor | None:
        """This rank's part of the kept weights [numel], to save. None before the first gather.

        Clears `_sent`. A resumed run also starts without `_sent`, so both runs send equal messages.
        """
        self._sent = None
        return self.resumed if self.kept is None else self.kept.chunk(self._ranks)[self._rank]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        layout = self._matching_layout(input_tensor)
        if layout is None:
            self._count(all_gather_bytes(input_tensor.nbytes, group.size()))
            work: dist.Work | None = self._default(output_tensor, input_tensor, group, async_op)
            return work
        with span("dct::gather_weights"):
            if layout.format == "int4":
                self._gather_changes(layout, output_tensor, input_tensor, group)
            else:
                messages = self._gather(layout, input_tensor, input_tensor.dtype, group)
                shards = zip(messages.split(1), output_tensor.view(self._ranks, -1), strict=True)
                statuses = [layout.unpack(*shard, input_tensor.dtype) for shard in shards]
                self._record(torch.cat(statuses))
        return None

    def _gather(
        self, layout: MessageLayout, part: Tensor, dtype: torch.dtype, group: dist.ProcessGroup
    ) -> Tensor:
        """Pack `part` and gather the messages of all ranks [P, nbytes]."""
        message = part.new_zeros(layout.nbytes(dtype), dtype=torch.uint8)
        layout.pack(part, message, dtype)
        messages = message.new_empty(self._ranks, len(message))
        self._count(all_gather_bytes(len(message), self._ranks))
        all_gather(messages, message, group)
        return messages

    def _gather_changes(
        self, layout: MessageLayout, output: Tensor, part: Tensor, group: dist.ProcessGroup
    ) -> None:
        sends = backward_pass() == NO_PASS  # the backward pass uses the weights of the forward pass
        if self.kept is None:
            with torch.inference_mode(False):  # the first gather may run in inference mode
                self.kept = torch.empty_like(output)
            sends = self.resumed is not None
            whole = self.resumed if self.resumed is not None else part
            self._count(all_gather_bytes(whole.nbytes, self._ranks))
            all_gather(self.kept, whole, group)
            self.resumed = None
            if not sends:
                self._remember(part)
        if sends:
            self._send_change(layout, self.kept.view(self._ranks, -1), part, group)
        output.copy_(self.kept)

    def _send_change(
        self, layout: MessageLayout, kept: Tensor, part: Tensor, group: dist.ProcessGroup
    ) -> None:
        # Non-finite kept weights restart from 0. Small parameters also restart from 0, because each
        # message contains their values instead of changes.
        kept.nan_to_num_(0, 0, 0)
        layout.zero_small(kept)
        base = kept[self._rank]
        if self._sent is not None:
            base = torch.where(part.eq(self._sent).all(), part, base)
        change = part.float() - base
        small = zip(layout.small_views(change), layout.small_views(part), strict=True)
        for target, source in small:
            target.copy_(source)
        self._remember(part)
        messages = self._gather(layout, change, part.dtype, group)
        statuses = []
        for message, shard in zip(messages.split(1), kept, strict=True):
            statuses.append(layout.unpack(message, change, part.dtype))
            shard += change
        self._record(torch.cat(statuses))

    def _remember(self, part: Tensor) -> None:
        if self._sent is None:
            with torch.inference_mode(False):
                self._sent = torch.empty_like(part)
        self._sent.copy_(part)


class GradientReduceScatter(_Collective):
    """The reduce-scatter of the gradients of a module, as an all-to-all of messages.

    The owner of a shard sums the messages of all ranks in rank order, in float32.

    Args:
        divide_factor: returns the user's divide factor for gradients, or None.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        layout: Callable[[], MessageLayout | None],
        default: Any,
        count: Count,
        divide_factor: Callable[[], float | None],
    ) -> None:
        super().__init__(group, layout, default, count)
        self._divide_factor = divide_factor

    @staticmethod
    def _itemsize(dtype: torch.dtype) -> int:
        return 4  # compare with a dense float32 collective, because the sum is in float32

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        layout, dtype = self._matching_layout(output_tensor), input_tensor.dtype
        if layout is None:
            self._count(all_gather_bytes(output_tensor.nbytes, group.size()))
            work: dist.Work | None = self._default(output_tensor, input_tensor, group, op, async_op)
            return work
        with span("dct::reduce_gradients"):
            messages = input_tensor.new_zeros(self._ranks, layout.nbytes(dtype), dtype=torch.uint8)
            parts = input_tensor.view(self._ranks, -1)
            for part, message in zip(parts, messages, strict=True):
                layout.pack(part, message, dtype)
            received = torch.empty_like(messages)
            self._count(all_gather_bytes(messages.shape[1], self._ranks))
            dist.all_to_all_single(received, messages, group=group)
            self._record(layout.unpack(received, output_tensor, dtype, self._scale(op)))
        return None

    def _scale(self, op: ReduceOp | ReduceOp.RedOpType) -> float:
        if op == ReduceOp.SUM:
            return 1.0
        factor = self._ranks if op == ReduceOp.AVG else self._divide_factor()  # or PREMUL_SUM
        return 1 / (factor or 1)
