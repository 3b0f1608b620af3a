"""Eager quantize_pack and dequantize_sum."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import layout
from .quantized_rows import row_dequantize, row_quantize
from .rounding import round_to
from .thresholds import scaled

_SCALES = layout.ROW // layout.SCALED  # per row
_MOST = 2**32 - 1  # the largest capacity and count in a header


def quantize_pack(
    residual: Tensor | None,
    grad: Tensor,
    payload: Tensor,
    format: str,
    inv_scale: Tensor | None = None,
) -> None:
    acc = scaled(grad, inv_scale)
    if residual is not None:
        acc = residual + acc
    rows = payload.view(-1, payload.shape[-1])
    old = [None] * len(rows) if residual is None else _ranges(residual, len(rows))
    for each in zip(_ranges(acc, len(rows)), old, rows, strict=True):
        _pack(*each, format)


def dequantize_sum(
    payloads: Tensor,
    out: Tensor,
    format: str,
    scale: float = 1.0,
    out_scale: Tensor | None = None,
) -> Tensor:
    total, status = _sum(payloads, out, format)
    factor = total.new_tensor(scale)
    if out_scale is not None:
        factor = factor * out_scale.reshape(())
    out.copy_(round_to(factor * total, out.dtype))
    return status


def _pack(acc: Tensor, residual: Tensor | None, payload: Tensor, format: str) -> None:
    """Write the payload of one range and, unless `residual` is None, the new residual."""
    numel = acc.numel()
    blocks = torch.nn.functional.pad(acc, (0, -numel % layout.ROW)).view(-1, layout.SCALED)
    if format in layout.UNSCALED:
        codes = round_to(blocks, getattr(torch, format), saturate=True)
        value, sent = codes.to(torch.float32), blocks.isfinite()
    else:
        codes = row_quantize(blocks, format)
        value = row_dequantize(codes, layout.SCALED, format, torch.float32)
        sent = value.isfinite()
    body = _to_bytes(codes, format)
    payload[layout.HEADER_BYTES : layout.HEADER_BYTES + body.numel()] = body
    flags = 0 if bool(sent.all()) else layout.FLAG_NON_FINITE
    header = list(_header(numel, format, flags))
    payload[: layout.HEADER_BYTES] = torch.tensor(header, dtype=torch.uint8, device=acc.device)
    if residual is not None:
        left, sent = (blocks - value).view(-1)[:numel], sent.reshape(-1)[:numel]
        old = torch.where(residual.isfinite(), residual, 0.0)
        residual.copy_(torch.where(sent, left, old))


def _sum(payloads: Tensor, out: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return the sum in rank order from +0.0, float32 like `out`, and the status."""
    ranks, ranges = payloads.shape[0], payloads.shape[1] if payloads.dim() == 3 else 1
    rows = payloads.view(ranks, ranges, payloads.shape[-1])
    status = torch.zeros(ranks, ranges, dtype=torch.int32, device=payloads.device)
    total = torch.zeros_like(out, dtype=torch.float32)
    for p in range(ranks):
        for r, part in enumerate(_ranges(total, ranges)):
            header = bytearray(rows[p, r, : layout.HEADER_BYTES].tolist())
            header[layout.FLAGS_BYTE] &= ~layout.FLAG_NON_FINITE
            if header == _header(part.numel(), format, 0):
                part.add_(_values(rows[p, r], part.numel(), format))
            else:
                status[p, r] = 1
    return total, status if out.dim() == 2 else status.amax(1)


def _ranges(tensor: Tensor, ranges: int) -> Sequence[Tensor]:
    """Views of the ranges, which are the rows of a two-dimensional tensor."""
    if tensor.dim() == 2:
        return tensor.unbind()
    bounds = (layout.range_bounds(tensor.numel(), ranges, r) for r in range(ranges))
    return [tensor[low:high] for low, high in bounds]


def _values(payload: Tensor, numel: int, format: str) -> Tensor:
    """The decoded values, float32 [numel]."""
    size = layout.quantized_row_bytes(format)
    nrows = (numel + layout.ROW - 1) // layout.ROW
    body = payload[layout.HEADER_BYTES :][: nrows * size].reshape(nrows, size)
    if format in layout.UNSCALED:
        return body.clone().view(getattr(torch, format)).to(torch.float32).view(-1)[:numel]
    each = layout.CODE_BYTES[format]
    codes = body[:, : _SCALES * each].reshape(-1, each)
    scales = body[:, _SCALES * each :].reshape(-1, 2)
    rows = torch.cat([codes, scales], 1)
    return row_dequantize(rows, layout.SCALED, format, torch.float32).view(-1)[:numel]


def _to_bytes(codes: Tensor, format: str) -> Tensor:
    """The payload bytes of values, or of quantized groups. Each row holds codes, then scales."""
    if format in layout.UNSCALED:
        return codes.view(torch.uint8).view(-1)
    each = layout.CODE_BYTES[format]
    parts = [codes[:, :each].reshape(-1, _SCALES * each), codes[:, each:].reshape(-1, 2 * _SCALES)]
    return torch.cat(parts, 1).view(-1)


def _header(numel: int, format: str, flags: int) -> bytes:
    entries = min(numel, _MOST)
    code = layout.QUANTIZED_CODES[format]
    kind = (layout.MAGIC, layout.QUANTIZED_VERSION, code, flags)
    return layout.HEADER.pack(*kind, numel, entries, entries, bytes(40))
