"""A codec that sends all entries, and keeps the rounding error as the residual."""

import torch
from torch import Tensor

from dct_kernels import quantized_payload_bytes
from dct_kernels.layout import HEADER_BYTES, QUANTIZED_CODES, UNSCALED, range_bounds

from ..compressor import warn_if_eager

FORMATS = tuple(QUANTIZED_CODES)
QUANTIZED_FORMATS = tuple(format for format in FORMATS if format not in UNSCALED)

_quantize_pack = torch.ops.dct.quantize_pack.default
_dequantize_sum = torch.ops.dct.dequantize_sum.default


class Quantized:
    """A `Codec` that packs all entries of a flat tensor, and keeps the rounding error as residual.

    Sent value + new residual is exactly the accumulated value, except that "ternary" rounds the
    residual once. See `dct_kernels.quantize_pack` for non-finite entries.

    Args:
        numel: number of elements of the flat tensor.
        format: one of FORMATS. The residual of "float32" is 0.
        ranges: number of payloads, each for an equal range of whole blocks.
        row_of: if this tensor is one of several ranges, the number of elements of the longest one.
        device: the device of all tensors.
        has_residual: whether to keep rounding errors. If False, `residual` is empty.

    Attributes:
        residual: float32 [numel], the rounding errors, in units of the unscaled gradient.
        threshold: float32 [ranges], always 0, because all entries are sent.
        payload: uint8 [nbytes], or [ranges, nbytes] with several ranges; the last packed payload.
        step: number of times that entries were packed.
    """

    def __init__(
        self,
        numel: int,
        format: str,
        ranges: int,
        row_of: int | None,
        device: torch.device,
        has_residual: bool = True,
    ) -> None:
        warn_if_eager(device.type)
        longest = range_bounds(numel, ranges, 0)[1] if row_of is None else row_of
        self._format, self._has_residual = format, has_residual
        kept = numel if has_residual else 0
        self.residual = torch.zeros(kept, dtype=torch.float32, device=device)
        self.threshold = torch.zeros(ranges, dtype=torch.float32, device=device)
        nbytes = quantized_payload_bytes(longest, format)
        shape = (ranges, nbytes) if ranges > 1 else (nbytes,)
        self.payload = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.step = 0

    def pack(self, grad: Tensor, inv_scale: Tensor | None = None) -> Tensor:
        """See `Compressor.pack`."""
        residual = self.residual if self._has_residual else None
        _quantize_pack(residual, grad, self.payload, self._format, inv_scale)
        self.step += 1
        return self.payload

    def unpack(self, payloads: Tensor, out: Tensor, out_scale: Tensor | None = None) -> Tensor:
        """See `Compressor.unpack`."""
        status: Tensor = _dequantize_sum(payloads, out, self._format, 1 / len(payloads), out_scale)
        return status

    def take_back(self, mean: Tensor | None = None) -> None:
        """See `Compressor.take_back`."""
        sent = torch.empty_like(self.residual)
        self.unpack(self.payload.unsqueeze(0), sent)
        finite = sent.isfinite()  # packing left the residual of non-finite entries unchanged
        self.residual += torch.where(finite, sent, 0.0)
        if mean is not None:
            self.residual -= torch.where(finite, mean, 0.0)
        self.payload[..., :HEADER_BYTES].zero_()
