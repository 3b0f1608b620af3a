"""Eager row_pack, row_gather and row_unpack."""

import torch
from torch import Tensor

from ..row_layout import Encoding, position_bytes, position_encoding
from .rounding import magnitude_key, round_to


def row_pack(x: Tensor, k: int, value_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keys = magnitude_key(x.to(torch.float32))
    # A stable sort keeps equal magnitudes in column order, so lower columns are selected first.
    largest = keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
    columns = largest.sort(dim=1).values
    values = round_to(x.gather(1, columns).to(torch.float32), value_dtype)
    return values, _encode(columns, x.shape[1])


def row_gather(x: Tensor, positions: Tensor, k: int, value_dtype: torch.dtype) -> Tensor:
    columns = _decode(positions, x.shape[1], k)
    gathered = x.gather(1, columns.clamp(min=0)).to(torch.float32)
    return round_to(torch.where(columns >= 0, gathered, 0.0), value_dtype)


def row_unpack(values: Tensor, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    columns = _decode(positions, width, values.shape[1])
    out = torch.zeros(values.shape[0], width, dtype=dtype, device=values.device)
    row, slot = (columns >= 0).nonzero(as_tuple=True)
    out[row, columns[row, slot]] = round_to(values.to(torch.float32), dtype)[row, slot]
    return out


def _encode(columns: Tensor, width: int) -> Tensor:
    """Ascending columns, int64 [B, k] -> uint8 [B, w]."""
    rows, k = columns.shape
    encoding = position_encoding(width, k)
    if encoding is Encoding.UINT8:
        return columns.to(torch.uint8)
    if encoding is Encoding.UINT16:
        return columns.to(torch.uint16).view(torch.uint8)
    nbytes = position_bytes(width, k)
    bits = torch.zeros(rows, nbytes * 8, dtype=torch.uint8, device=columns.device)
    bits.scatter_(1, columns, 1)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=columns.device)
    return (bits.view(rows, nbytes, 8) * weights).sum(2, dtype=torch.uint8)


def _decode(positions: Tensor, width: int, k: int) -> Tensor:
    """uint8 [B, w] -> columns, int64 [B, k], with -1 in slots whose column is not accepted."""
    encoding = position_encoding(width, k)
    if encoding is Encoding.BITMAP:
        return _decode_bitmap(positions, width, k)
    dtype = torch.uint8 if encoding is Encoding.UINT8 else torch.uint16
    columns = positions.clone().view(dtype).to(torch.int64)
    inside = torch.where(columns < width, columns, -1)
    highest = inside.cummax(dim=1).values
    accepted = inside.clone()
    accepted[:, 1:][inside[:, 1:] <= highest[:, :-1]] = -1
    return accepted


def _decode_bitmap(positions: Tensor, width: int, k: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=positions.device)
    bits = ((positions.unsqueeze(2) >> shifts) & 1).flatten(1)[:, :width].to(torch.bool)
    slots = bits.cumsum(1) - 1
    row, column = (bits & (slots < k)).nonzero(as_tuple=True)
    columns = torch.full((positions.shape[0], k), -1, dtype=torch.int64, device=positions.device)
    columns[row, slots[row, column]] = column
    return columns
