"""Rows in few bits at a cut between two modules, for any transport that sends a tensor.

Every entry is sent, with a scale per row, for as few bytes as the largest entries alone, which may
lose more quality. Straight-through: the gradient of the received row, quantized in turn, is that of
the row that was sent. Our reconstruction of row-wise quantized exchange (FBGEMM). Knows no network.
"""

import torch
from torch import Tensor, nn

from dct_kernels import checks

from .codecs import dequantize, format_bytes, quantize
from .packing import as_rows
from .row_format import RowFormat
from .transfer import with_gradient

# Messages must be floating point, so that autograd and torch.distributed.pipelining send a gradient
# back, and the gradient has their shape: bytes, viewed as these, padded to the longer.
_CARRIER = torch.bfloat16


class RowQuantize(nn.Module):
    """The last module of a stage: [..., d] in, a message [..., m] out, m in units of 2 bytes.

    The message is bytes viewed as bfloat16: send, receive or copy it, but do not compute with it,
    and give it to one module only, a `RowDequantize` of the same formats. Its gradient is also a
    message. Quantizes in eval mode as well. Has no parameters and no state; x, float32, bfloat16 or
    float16, is not mutated. Deterministic, bitwise the same on every backend.

    Args:
        format: a name, a torch dtype, or a `RowFormat` without a density: "int4", or
            `RowFormat("int4", backward="sign")`.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
    """

    def __init__(self, format: str | torch.dtype | RowFormat) -> None:
        super().__init__()
        self.format = _require_every_entry("RowQuantize", format)

    def forward(self, x: Tensor) -> Tensor:
        checks.require_type("RowQuantize", "x", x, Tensor, "a tensor")
        if x.dim() == 0 or x.dtype not in checks.FLOATS:
            got = f"{x.dim()}-D {str(x.dtype).removeprefix('torch.')}"
            checks.fail("RowQuantize", "x", "float32, bfloat16 or float16, at least 1-D", got)
        there, back = self.format.both(x.dtype)
        width, size, dtype = x.shape[-1], message_size(x.shape[-1], there, back), x.dtype
        return with_gradient(
            x,
            lambda rows: _to_message(rows, there, size),
            lambda grad: _from_message(grad, width, back, dtype),
        )

    def extra_repr(self) -> str:
        return str(self.format)


class RowDequantize(nn.Module):
    """The first module of the next stage: the message of a `RowQuantize` in, [..., width] out.

    Messages are not trusted: any bytes of the right length give some numbers. Deterministic.

    Args:
        width: d of the rows.
        format: as given to `RowQuantize`.
        dtype: of the result, float32, bfloat16 or float16.

    Raises:
        ValueError, TypeError: an argument is out of its range, or a message is not of the length
            that width and formats give; the text names it.
    """

    def __init__(
        self, width: int, format: str | torch.dtype | RowFormat, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        checks.require_int("RowDequantize", "width", width, 1, 2**31 - 1)
        checks.require_dtype("RowDequantize", "dtype", dtype, checks.FLOATS)
        self.format = _require_every_entry("RowDequantize", format)
        self.width, self.dtype = width, dtype

    def forward(self, message: Tensor) -> Tensor:
        there, back = self.format.both(self.dtype)
        m = message_size(self.width, there, back)
        checks.require_dtype("RowDequantize", "dtype of message", message.dtype, (_CARRIER,))
        if message.dim() == 0 or message.shape[-1] != m:
            got = list(message.shape)
            rule = f"shape [..., {m}] for width {self.width}"
            checks.fail("RowDequantize", "message", rule, got, verb="have")
        width, dtype = self.width, self.dtype
        return with_gradient(
            message,
            lambda sent: _from_message(sent, width, there, dtype),
            lambda grad: _to_message(grad, back, m),
        )

    def extra_repr(self) -> str:
        return f"width={self.width}, {self.format}, dtype={self.dtype}"


def message_size(width: int, forward: str, backward: str) -> int:
    """Elements of 2 bytes in the message of one row, either way."""
    longer = max(format_bytes(width, forward), format_bytes(width, backward))
    return (longer - 1) // _CARRIER.itemsize + 1


def _to_message(x: Tensor, format: str, size: int) -> Tensor:
    coded = quantize(as_rows(x), format)
    message = coded.new_zeros(coded.shape[0], size * _CARRIER.itemsize)
    message[:, : coded.shape[1]] = coded
    return message.view(_CARRIER).view(*x.shape[:-1], size)


def _from_message(message: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    coded = as_rows(message).view(torch.uint8)[:, : format_bytes(width, format)]
    return dequantize(coded, width, format, dtype).view(*message.shape[:-1], width)


def _require_every_entry(owner: str, format: str | torch.dtype | RowFormat) -> RowFormat:
    form = RowFormat.of(owner, format)
    if form.density is not None or form.forward is None:
        checks.fail(owner, "format", "one of every entry (for the largest ones use RowPack)", form)
    return form
