"""Collectives between the shards of a module in few bits, which FSDP2 calls in place of its own.

FSDP2 gathers the shards of all parameters of a module as one flat tensor, and reduces their
gradients in the same order. A rank's part of that tensor becomes one message: matrices in few bits,
and parameters of fewer than two dimensions as they are.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from dct_kernels import checks, quantized_payload_bytes

from .._torch import NO_PASS, backward_pass, span
from ..collectives import all_gather, all_gather_bytes, reduce_scatter
from ..formats import DTYPES

_quantize_pack = torch.ops.dct.quantize_pack.default
_dequantize_sum = torch.ops.dct.dequantize_sum.default
_ALIGNMENT = 16  # of payloads, in bytes

OP = "compress_fully_shard"  # in errors

FORMATS = ("float32", "bfloat16", "int8", "int4")

Count = Callable[[int], None]  # counts the bytes that this rank sends


class MessageLayout:
    """How a rank's part of a flat tensor becomes a message: a payload, and small parameters.

    Args:
        parameters: in order, the elements of each, and whether it is small.
        format: of the payload, as of `dct_kernels.quantize_pack`.

    Attributes:
        numel: elements of the part.
        small_numel: elements of the small parameters.
    """

    def __init__(self, parameters: Sequence[tuple[int, bool]], format: str) -> None:
        sizes = [size for size, _ in parameters]
        bounds = pairwise([0, *accumulate(sizes)])
        small = [
            (low, high)
            for (low, high), (_, is_small) in zip(bounds, parameters, strict=True)
            if is_small
        ]
        self._small = [slice(low, high) for low, high in small]
        self._small_sizes = [high - low for low, high in small]
        self.numel, self.small_numel, self.format = sum(sizes), sum(self._small_sizes), format
        self._payload_bytes = quantized_payload_bytes(self.numel, format)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of a message of a part of this dtype."""
        small_bytes = self.small_numel * dtype.itemsize
        return self._payload_bytes + -(-small_bytes // _ALIGNMENT) * _ALIGNMENT

    def small_views(self, tensor: Tensor) -> list[Tensor]:
        """The small parameters in a tensor [..., numel]."""
        return [tensor[..., where] for where in self._small]

    def pack(self, part: Tensor, message: Tensor, dtype: torch.dtype) -> None:
        """Write `part` [numel] into the message. Sets its small parameters to 0."""
        if self._small:
            small = torch.cat(self.small_views(part)).to(dtype).view(torch.uint8)
            message[self._payload_bytes :][: len(small)] = small
            torch._foreach_zero_(self.small_views(part))  # their scales are not those of matrices
        _quantize_pack(None, part, message[: self._payload_bytes], self.format)

    def unpack(self, messages: Tensor, out: Tensor, dtype: torch.dtype, scale: float = 1) -> Tensor:
        """Write the sum of messages times `scale` into `out` [numel]: in order, in float32.

        Returns:
            status int32 [messages]: not 0 if a payload was damaged, which adds nothing.
        """
        payloads, tails = messages.tensor_split([self._payload_bytes], dim=1)
        status: Tensor = _dequantize_sum(payloads.contiguous(), out, self.format, scale)
        if self._small:
            nbytes = self.small_numel * dtype.itemsize
            first, *others = tails[:, :nbytes].contiguous().view(dtype).float()
            for other in others:
                first += other
            small = (first * scale).split(self._small_sizes)
            torch._foreach_copy_(self.small_views(out), list(small))
        return status


class _Collective:
    """Has the interface of FSDP2's collectives: `allocate`, and the call.

    Args:
        group: the ranks that hold the shards.
        layout: of messages. None: torch's collective is called, as for parts that the layout does
            not fit.
        count: counts the bytes that this rank sends.

    Attributes:
        status: int32 [P], not 0 for ranks that have sent a damaged payload; None before the first.
    """

    def __init__(
        self, group: dist.ProcessGroup, layout: MessageLayout | None, count: Count
    ) -> None:
        self.layout, self._count = layout, count
        self._ranks, self._rank = group.size(), group.rank()
        self.status: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _layout_for(self, part: Tensor) -> MessageLayout | None:
        """The layout if it fits this part: the numbers of all parameters, and several ranks."""
        layout = self.layout if self._ranks > 1 and part.dtype in checks.FLOATS else None
        return layout if layout is not None and part.numel() == layout.numel else None

    def message_bytes(self, dtype: torch.dtype | None, whole: int) -> int:
        """Bytes of the message of a part of this dtype; `whole` are those of torch's."""
        return whole if self.layout is None or dtype is None else self.layout.nbytes(dtype)

    def _note(self, status: Tensor) -> None:
        self.status = status if self.status is None else self.status.maximum(status)


class WeightGather(_Collective):
    """The all-gather of the weights of a module.

    Every rank unpacks all shards from messages, its own shard as well, so all ranks compute with
    equal bits. In "int4", a message contains the change since the last gather, and every rank adds
    it to the weights that it keeps. The rounding error becomes part of the next change.

    Attributes:
        kept: [P * numel], the weights of the last gather, in "int4".
        resumed: this rank's part of the weights that a saved run kept, until the first gather.
    """

    kept: Tensor | None = None
    resumed: Tensor | None = None

    @property
    def sends_changes(self) -> bool:
        return self.layout is not None and self.layout.format == "int4"

    def kept_bytes(self, dtype: torch.dtype | None) -> int:
        """Bytes of the weights that are kept, once there are any."""
        if self.layout is None or dtype is None or not self.sends_changes:
            return 0
        return self._ranks * self.layout.numel * dtype.itemsize

    def own_part(self) -> Tensor | None:
        """This rank's part of the kept weights [numel]; None before the first gather."""
        return self.resumed if self.kept is None else self.kept.chunk(self._ranks)[self._rank]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        layout, dtype = self._layout_for(input_tensor), input_tensor.dtype
        if layout is None or DTYPES.get(layout.format) == dtype:
            work: dist.Work | None = self._whole(output_tensor, input_tensor, group, async_op)
            return work
        with span("dct::gather_weights"):
            if self.sends_changes:
                self._gather_changes(layout, output_tensor, input_tensor, group)
            else:
                messages = self._gather(layout, input_tensor, dtype, group)
                shards = zip(messages.split(1), output_tensor.view(self._ranks, -1), strict=True)
                self._note(torch.cat([layout.unpack(*shard, dtype) for shard in shards]))
        return None

    def _whole(
        self, output: Tensor, part: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._count(all_gather_bytes(part.nbytes, group.size()))
        work: dist.Work | None = all_gather(output, part, group, async_op)
        return work

    def _gather(
        self, layout: MessageLayout, part: Tensor, dtype: torch.dtype, group: dist.ProcessGroup
    ) -> Tensor:
        """The messages of all ranks [P, nbytes]."""
        message = part.new_zeros(layout.nbytes(dtype), dtype=torch.uint8)
        layout.pack(part, message, dtype)
        messages = message.new_empty(self._ranks, len(message))
        self._count(all_gather_bytes(len(message), self._ranks))
        all_gather(messages, message, group)
        return messages

    def _gather_changes(
        self, layout: MessageLayout, output: Tensor, part: Tensor, group: dist.ProcessGroup
    ) -> None:
        if self.kept is None:
            self.kept = torch.empty_like(output)
            self._whole(self.kept, part if self.resumed is None else self.resumed, group)
            sends = self.resumed is not None
            self.resumed = None
        else:
            sends = backward_pass() == NO_PASS  # the weights are those of the forward pass
        if sends:
            # A weight that is not finite any more starts again from 0, as small parameters do.
            self.kept.nan_to_num_(0, 0, 0)
            kept = self.kept.view(self._ranks, -1)
            torch._foreach_zero_(layout.small_views(kept))
            change = part.float().sub_(kept[self._rank])
            messages = self._gather(layout, change, part.dtype, group)
            statuses = []
            for message, shard in zip(messages.split(1), kept, strict=True):
                statuses.append(layout.unpack(message, change, part.dtype))
                shard += change
            self._note(torch.cat(statuses))
        output.copy_(self.kept)


class GradientReduceScatter(_Collective):
    """The reduce-scatter of the gradients of a module, by an all-to-all of messages.

    The owner of a shard adds up the messages of all ranks in rank order, in float32.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        layout, dtype = self._layout_for(output_tensor), input_tensor.dtype
        if layout is None:
            self._count(all_gather_bytes(output_tensor.nbytes, group.size()))
            reduce_scatter(output_tensor, input_tensor, group, op)
            return
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(
                f"dct::{OP}: the divide factor of gradients must be set before this call, or "
                "followed by model.set_force_sum_reduction_for_comms(True), got one that was set "
                "later"
            )
        with span("dct::reduce_gradients"):
            messages = input_tensor.new_zeros(self._ranks, layout.nbytes(dtype), dtype=torch.uint8)
            parts = input_tensor.view(self._ranks, -1)
            for part, message in zip(parts, messages, strict=True):
                layout.pack(part, message, dtype)
            received = torch.empty_like(messages)
            self._count(all_gather_bytes(messages.shape[1], self._ranks))
            dist.all_to_all_single(received, messages, group=group)
            scale = 1 / self._ranks if op == ReduceOp.AVG else 1.0
            self._note(layout.unpack(received, output_tensor, dtype, scale))
