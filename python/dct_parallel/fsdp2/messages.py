"""The messages that FSDP2 sends between shards.

FSDP2 gathers the shards of all parameters of a module as one flat tensor, and reduces their
gradients in the same order. A message contains one rank's part of this tensor. Vectors (parameters
with fewer than two dimensions) are sent unchanged. All other parameters are sent in the format that
the user chose.
"""

from functools import cache
from itertools import accumulate, chain, pairwise

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
        device: the device of the tensors.

    Attributes:
        numel: the number of elements of the part.
    """

    def __init__(
        self, parameters: tuple[tuple[int, bool], ...], format: str, device: torch.device
    ) -> None:
        bounds = pairwise([0, *accumulate(size for size, _ in parameters)])
        spans = zip(bounds, parameters, strict=True)
        vectors = [range(low, high) for (low, high), (_, is_vector) in spans if is_vector]
        indices = [*chain(*vectors)]  # of their elements
        self._vectors = torch.tensor(indices, dtype=torch.int64, device=device)
        self._vector_numel = len(indices)  # stored, because len() of a tensor takes a microsecond
        self.numel, self._format = sum(size for size, _ in parameters), format
        self._payload_bytes = quantized_payload_bytes(self.numel, format)

    def nbytes(self, dtype: torch.dtype) -> int:
        """The size of a message for a part with this dtype."""
        vector_bytes = self._vector_numel * dtype.itemsize
        return self._payload_bytes + -(-vector_bytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, parts: Tensor) -> Tensor:
        """Return messages [R, nbytes] of `parts` [R, numel]. Sets the vectors of `parts` to 0."""
        messages = parts.new_empty(parts.shape[0], self.nbytes(parts.dtype), dtype=torch.uint8)
        if self._vector_numel:
            sent = self._tails(messages, parts.dtype)
            torch.gather(parts, 1, self._vectors.expand(parts.shape[0], -1), out=sent)
            if padding := -(sent.shape[1] * sent.itemsize) % _ALIGNMENT:
                messages.narrow(1, -padding, padding).zero_()
            # So that vectors do not affect the scales of matrices.
            parts.index_fill_(1, self._vectors, 0)
        _quantize_pack(None, parts, messages, self._format)
        return messages

    def unpack(self, messages: Tensor, out: Tensor) -> Tensor:
        """Write each of `messages` [R, nbytes] into a row of `out` [R, numel], or 0 if damaged.

        Returns:
            status int32 [R], not 0 for a damaged message.
        """
        status: Tensor = _dequantize_sum(messages.unsqueeze(0), out, self._format).view(-1)
        if self._vector_numel:
            received = self._received(messages, status, out.dtype)
            out.scatter_(1, self._vectors.expand(out.shape[0], -1), received)
        return status

    def sum(self, messages: Tensor, out: Tensor, scale: float) -> Tensor:
        """Write the sum of `messages` [P, nbytes] times `scale` into `out` [numel].

        Sums are in float32. The sum of matrices is in rank order. The order for vectors is torch's.

        Returns:
            status int32 [P], not 0 for a damaged message, which the sum omits.
        """
        status: Tensor = _dequantize_sum(messages, out, self._format, scale)
        if self._vector_numel:
            received = self._received(messages, status, out.dtype)
            total = received.sum(0, dtype=torch.float32).mul_(scale)
            out.scatter_(0, self._vectors, total.to(out.dtype))
        return status

    def _tails(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """A view of the vectors in each message, [number of messages, number of elements]."""
        begin = self._payload_bytes // dtype.itemsize
        return messages.view(dtype).narrow(1, begin, self._vector_numel)

    def _received(self, messages: Tensor, status: Tensor, dtype: torch.dtype) -> Tensor:
        """The vectors of each message. Sets the vectors of damaged messages to 0."""
        return self._tails(messages, dtype).masked_fill_(status.ne(0).unsqueeze(1), 0)


@cache
def message_layout(
    parameters: tuple[tuple[int, bool], ...], format: str, device: torch.device
) -> MessageLayout:
    """Return the layout for these parameters. Equal modules share one layout object."""
    return MessageLayout(parameters, format, device)
