"""The messages that FSDP2 sends between shards.

FSDP2 gathers the shards of all parameters of a module as one flat tensor, and reduces their
gradients in the same order. A message contains one rank's part of this tensor. Vectors (parameters
with fewer than two dimensions) are sent unchanged. All other parameters are sent in the format that
the user chose.
"""

from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dct_kernels import quantized_payload_bytes

_quantize_pack = torch.ops.dct.quantize_pack.default
_dequantize_sum = torch.ops.dct.dequantize_sum.default
_ALIGNMENT = 16  # the alignment of payloads in bytes


class MessageLayout:
    """The layout of a message for a rank's part of a flat tensor: a payload, then the vectors.

    Args:
        parameters: for each parameter, the number of elements and whether it is a vector.
        format: the format of the payload, as for `dct_kernels.quantize_pack`.

    Attributes:
        numel: the number of elements of the part.
    """

    def __init__(self, parameters: tuple[tuple[int, bool], ...], format: str) -> None:
        bounds = pairwise([0, *accumulate(size for size, _ in parameters)])
        spans = zip(bounds, parameters, strict=True)
        self._vectors = [slice(low, high) for (low, high), (_, is_vector) in spans if is_vector]
        self._vector_sizes = [size for size, is_vector in parameters if is_vector]
        self.numel, self._format = sum(size for size, _ in parameters), format
        self._payload_bytes = quantized_payload_bytes(self.numel, format)

    def nbytes(self, dtype: torch.dtype) -> int:
        """The size of a message for a part with this dtype."""
        vector_bytes = sum(self._vector_sizes) * dtype.itemsize
        return self._payload_bytes + -(-vector_bytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, part: Tensor, message: Tensor, dtype: torch.dtype) -> None:
        """Write `part` [numel] into the message. Sets the vectors of `part` to 0."""
        if self._vectors:
            vectors = [part[where] for where in self._vectors]
            tail = torch.cat(vectors).to(dtype).view(torch.uint8)
            message[self._payload_bytes :][: len(tail)] = tail
            torch._foreach_zero_(vectors)  # so that they do not affect the scales of matrices
        _quantize_pack(None, part, message[: self._payload_bytes], self._format)

    def unpack(self, messages: Tensor, out: Tensor, dtype: torch.dtype, scale: float = 1) -> Tensor:
        """Write the sum of the messages times `scale` into `out` [numel], in order and in float32.

        Returns:
            status int32 [number of messages], not 0 for a damaged message, which the sum omits.
        """
        payloads, tails = messages.tensor_split([self._payload_bytes], dim=1)
        status: Tensor = _dequantize_sum(payloads.contiguous(), out, self._format, scale)
        if self._vectors:
            nbytes = sum(self._vector_sizes) * dtype.itemsize
            vectors = tails[:, :nbytes].contiguous().view(dtype).float()
            total, *rest = vectors.masked_fill_(status.ne(0)[:, None], 0)
            for values in rest:
                total += values
            parts = (total * scale).split(self._vector_sizes)
            torch._foreach_copy_([out[where] for where in self._vectors], list(parts))
        return status


@cache
def message_layout(parameters: tuple[tuple[int, bool], ...], format: str) -> MessageLayout:
    """Return the layout for these parameters. Equal modules share one layout object."""
    return MessageLayout(parameters, format)
