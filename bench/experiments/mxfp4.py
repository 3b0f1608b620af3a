"""MXFP4 of the OCP Microscaling specification 1.0: a baseline for rows in few bits.

A row is E2M1 codes, two a byte (the first of two columns in the low half, the sign in bit 3), then
for every 32 columns, of which the last group may have fewer, a byte E8M0: 2**(floor(log2(largest
magnitude)) - 2), at least 2**-127. Values are rounded to nearest even and saturate at 6; a group
with a NaN or an infinity has the scale 255, and comes out as NaN.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_parallel.rows.all_to_all import whole_rows
from dct_parallel.rows.autograd import with_gradient

NAME = "mxfp4"
BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOAT32_NAN, INFINITY_KEY = 0x7FC00000, 0x7F800000


def row_bytes(width: int) -> int:
    return code_bytes(width) + blocks(width)


def code_bytes(width: int) -> int:
    return (width + 1) // 2


def blocks(width: int) -> int:
    return (width + BLOCK - 1) // BLOCK


def quantize(x: Tensor) -> Tensor:
    """float32 [B, d] -> uint8 [B, row_bytes(d)]."""
    rows, width = x.shape
    shape = rows, blocks(width), BLOCK
    x = torch.nn.functional.pad(x, (0, blocks(width) * BLOCK - width)).view(shape)
    top = (x.view(torch.int32) & 0x7FFFFFFF).amax(2, keepdim=True)
    finite = top < INFINITY_KEY
    # The largest is in [4, 8) once it is divided by the scale, if the exponent has 8 bits.
    scale = ((top >> 23) - 2).clamp(min=0)
    magnitude = x.abs() * ((254 - scale) << 23).view(torch.float32)
    codes = (magnitude > 0.25).to(torch.int32)
    codes += (magnitude >= 0.75).to(torch.int32) + (magnitude > 1.25) + (magnitude >= 1.75)
    codes += (magnitude > 2.5).to(torch.int32) + (magnitude >= 3.5) + (magnitude > 5)
    codes += (x.view(torch.int32) >> 28) & 8
    codes = torch.where(finite, codes, 0).flatten(1)[:, : 2 * code_bytes(width)]
    scale = torch.where(finite, scale, 255).flatten(1)
    return torch.cat([codes[:, 0::2] | codes[:, 1::2] << 4, scale], 1).to(torch.uint8)


def dequantize(rows: Tensor, width: int) -> Tensor:
    """uint8 [B, row_bytes(width)] -> float32 [B, width]."""
    nbytes = code_bytes(width)
    packed, scale = rows[:, :nbytes].to(torch.int64), rows[:, nbytes:].to(torch.int32)
    codes = torch.stack([packed & 15, packed >> 4], 2).flatten(1)[:, :width]
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=rows.device)
    power = torch.where(scale == 0, 1 << 22, scale << 23)  # 2**-127 is subnormal
    power = torch.where(scale == 255, FLOAT32_NAN, power).view(torch.float32)
    return values[codes] * power.repeat_interleave(BLOCK, 1)[:, :width]


def exchange(
    x: Tensor, splits: Sequence[int], output_splits: Sequence[int], *, group: dist.ProcessGroup
) -> Tensor:
    """A `RowExchange` of float32 rows, both ways in this format; straight-through."""

    def sent(rows: Tensor, there: Sequence[int], arriving: Sequence[int]) -> Tensor:
        message = whole_rows(quantize(rows), there, arriving, group=group)
        return dequantize(message, rows.shape[1])

    return with_gradient(
        x,
        lambda rows: sent(rows, splits, output_splits),
        lambda grad: sent(grad.contiguous(), output_splits, splits),
    )
