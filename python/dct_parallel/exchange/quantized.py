"""Every entry in few bits: rows of 1,024 with a scale each; rounding errors stay in the residual.

By ops of dct_kernels and plain tensor operations. The payload is version 3 of
docs/reference/payload.md.
"""

import torch
from torch import Tensor

from dct_kernels import row_dequantize, row_quantize
from dct_kernels.layout import (
    FLAG_NON_FINITE,
    FLAGS_BYTE,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    ROW_CODES,
    ROWS_VERSION,
    range_bounds,
)
from dct_kernels.row_layout import row_bytes

ROW = 1024  # elements; a block of 16,384 is whole rows
FORMATS = tuple(ROW_CODES)

_MOST = 2**32 - 1  # of the header's capacity and count


def payload_bytes(numel: int, format: str) -> int:
    """Bytes of the payload of a range of so many elements: a multiple of 16."""
    return (HEADER_BYTES + _rows(numel) * row_bytes(ROW, format) + 15) // 16 * 16


class QuantizedRows:
    """Packs all of a flat tensor, and keeps the rounding error as residual: a `Codec`.

    Value + new residual is the accumulated value, exactly in "int8" and "int4"; in "ternary" to one
    rounding of the residual, if an entry is far from its row's scale. A row with an entry that is
    not finite keeps its residual, all of it becomes NaN for every reader, and the header has a
    flag.

    Args:
        numel: elements of the flat tensor.
        format: "int8", "int4" or "ternary": see `dct_kernels.row_quantize`.
        ranges: how many payloads there are, each of an equal range of whole blocks.
        row_of: if this tensor is one range of several, the elements of the longest one.
        device: of all tensors.

    Attributes:
        residual: float32 [numel], not sent yet, in units of the unscaled gradient.
        threshold: float32 [ranges], zeros: everything is sent.
        payload: uint8 [nbytes], or [ranges, nbytes] with several ranges, the last one packed.
        step: how many times `pack` was called.
    """

    def __init__(
        self, numel: int, format: str, ranges: int, row_of: int | None, device: torch.device
    ) -> None:
        longest = range_bounds(numel, ranges, 0)[1] if row_of is None else row_of
        self._numel, self._format, self._ranges = numel, format, ranges
        self._rows = _rows(longest)  # of a range, in the last ones beyond the tensor's end
        self._row_bytes = row_bytes(ROW, format)
        self._owed = torch.zeros(ranges * self._rows, ROW, device=device)
        self.residual = self._owed.view(-1)[:numel]
        self.threshold = torch.zeros(ranges, device=device)
        self._payload = torch.zeros(
            ranges, payload_bytes(longest, format), dtype=torch.uint8, device=device
        )
        self.payload = self._payload if ranges > 1 else self._payload[0]
        sizes = [
            high - low for low, high in (range_bounds(numel, ranges, r) for r in range(ranges))
        ]
        headers = bytearray(b"".join(_header(size, format) for size in sizes))
        self._header = torch.frombuffer(headers, dtype=torch.uint8).view(ranges, -1).to(device)
        self._checked = torch.full_like(self._header, 255)  # bits that must be equal
        self._checked[:, FLAGS_BYTE] = 255 - FLAG_NON_FINITE
        self.step = 0

    def pack(self, grad: Tensor, inv_scale: Tensor | None = None) -> Tensor:
        """See `Compressor.pack`."""
        acc = self._owed.clone()
        acc.view(-1)[: self._numel] += grad if inv_scale is None else grad.float() * inv_scale
        rows = row_quantize(acc, self._format)
        left = acc.sub_(row_dequantize(rows, ROW, self._format, torch.float32))
        # A NaN is both. (aminmax takes 30 times as long as the two on the CPU.)
        finite = left.amin(1, keepdim=True).isfinite() & left.amax(1, keepdim=True).isfinite()
        torch.where(finite, left, self._owed, out=self._owed)
        non_finite = ~finite.view(self._ranges, -1).all(1)
        self._payload[:, :HEADER_BYTES] = self._header
        self._payload[:, FLAGS_BYTE] = FLAG_NON_FINITE * non_finite
        self._rows_of(self._payload).copy_(rows.view(self._ranges, -1))
        self.step += 1
        return self.payload

    def unpack(self, payloads: Tensor, out: Tensor, out_scale: Tensor | None = None) -> Tensor:
        """See `Compressor.unpack`. A payload whose header is wrong adds nothing."""
        payloads = payloads.view(-1, self._ranges, self._payload.shape[1])
        wrong = (payloads[..., :HEADER_BYTES] ^ self._header) & self._checked
        intact = (wrong == 0).all(2)
        total = torch.zeros_like(self._owed)
        for rank, whole in zip(payloads, intact, strict=True):
            # Bytes of zeros are rows of zeros.
            rows = self._rows_of(rank) * whole.view(-1, 1)
            rows = rows.view(-1, self._row_bytes)
            total += row_dequantize(rows, ROW, self._format, torch.float32)
        part = 1 / len(payloads)  # a number: no copy to the device, which the host waits for
        factor = part if out_scale is None else out_scale * part
        torch.mul(total.view(-1)[: self._numel], factor, out=out)
        return (~intact).any(1).int()

    def take_back(self) -> None:
        """See `Compressor.take_back`."""
        sent = torch.empty_like(self.residual)
        self.unpack(self.payload.unsqueeze(0), sent)
        self.residual += torch.where(sent.isfinite(), sent, 0.0)
        self._payload[:, :HEADER_BYTES].zero_()

    def _rows_of(self, payload: Tensor) -> Tensor:
        """The rows' bytes of a payload [ranges, nbytes]."""
        return payload[:, HEADER_BYTES : HEADER_BYTES + self._rows * self._row_bytes]


def _rows(numel: int) -> int:
    return -(-numel // ROW)


def _header(numel: int, format: str) -> bytes:
    entries = min(numel, _MOST)
    code = ROW_CODES[format]
    return HEADER.pack(MAGIC, ROWS_VERSION, code, 0, numel, entries, entries, bytes(40))
