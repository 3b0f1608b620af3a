"""The messages that FSDP2 sends between shards.

FSDP2 gathers the shards of all parameters of a module as one flat tensor, and reduces their
gradients in the same order. A message contains one rank's part of this tensor. Parameters with
fewer than two dimensions ("small" parameters) are sent unchanged. All other parameters are sent in
the format that the user chose.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dct_kernels import quantized_payload_bytes

_quantize_pack = torch.ops.dct.quantize_pack.default
_dequantize_sum = torch.ops.dct.dequantize_sum.default
_ALIGNMENT = 16  # the alignment of payloads in bytes


class MessageLayout:
    """The layout of a message for a rank's part of a flat tensor: a payload, then small parameters.

    Args:
        parameters: for each parameter, the number of elements and whether the parameter is small.
        format: the format of the payload, as for `dct_kernels.quantize_pack`.

    Attributes:
        numel: the number of elements of the part.
    """

    def __init__(self, parameters: Sequence[tuple[int, bool]], format: str) -> None:
        bounds = pairwise([0, *accumulate(size for size, _ in parameters)])
        self._small = [
            slice(low, high)
            for (low, high), (_, is_small) in zip(bounds, parameters, strict=True)
            if is_small
        ]
        self._small_sizes = [size for size, is_small in parameters if is_small]
        self.numel, self.format = sum(size for size, _ in parameters), format
        self._payload_bytes = quantized_payload_bytes(self.numel, format)

    def nbytes(self, dtype: torch.dtype) -> int:
        """The size of a message for a part with this dtype."""
        small_bytes = sum(self._small_sizes) * dtype.itemsize
        return self._payload_bytes + -(-small_bytes // _ALIGNMENT) * _ALIGNMENT

    def small_views(self, tensor: Tensor) -> list[Tensor]:
        """Views of the small parameters in a tensor [..., numel]."""
        return [tensor[..., where] for where in self._small]

    def zero_small(self, tensor: Tensor) -> None:
        """Set the small parameters in a tensor [..., numel] to 0."""
        if self._small:
            torch._foreach_zero_(self.small_views(tensor))

    def pack(self, part: Tensor, message: Tensor, dtype: torch.dtype) -> None:
        """Write `part` [numel] into the message. Sets the small parameters of `part` to 0."""
        if self._small:
            small = torch.cat(self.small_views(part)).to(dtype).view(torch.uint8)
            message[self._payload_bytes :][: len(small)] = small
            self.zero_small(part)  # so that they do not affect the scales of matrices
        _quantize_pack(None, part, message[: self._payload_bytes], self.format)

    def unpack(self, messages: Tensor, out: Tensor, dtype: torch.dtype, scale: float = 1) -> Tensor:
        """Write the sum of the messages times `scale` into `out` [numel], in order and in float32.

        Returns:
            status int32 [number of messages], not 0 for a damaged message, which the sum omits.
        """
        payloads, tails = messages.tensor_split([self._payload_bytes], dim=1)
        status: Tensor = _dequantize_sum(payloads.contiguous(), out, self.format, scale)
        if self._small:
            nbytes = sum(self._small_sizes) * dtype.itemsize
            small = tails[:, :nbytes].contiguous().view(dtype).float()
            total, *rest = small.masked_fill_(status.ne(0)[:, None], 0)
            for values in rest:
                total += values
            parts = (total * scale).split(self._small_sizes)
            torch._foreach_copy_(self.small_views(out), list(parts))
        return status


@cache
def message_layout(parameters: tuple[tuple[int, bool], ...], format: str) -> MessageLayout:
    """Return the layout for these parameters. Equal modules share one layout object."""
    return MessageLayout(parameters, format)
