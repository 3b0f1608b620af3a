"""Modules that quantize rows between two stages, for any transport that sends a tensor."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dct_kernels import checks

from .codecs import RowFormat, dequantize, format_bytes, quantize
from .packing import as_rows
from .transfer import with_gradient

# A message must be floating point, so that autograd and torch.distributed.pipelining send a
# gradient back. The gradient has the same shape, so both tensors are padded to the longer one.
_CARRIER = torch.bfloat16


class RowQuantize(nn.Module):
    """Quantizes rows as the last module of a stage: [..., d] to a message [..., m].

    The module quantizes all entries of a float32, bfloat16 or float16 tensor (not mutated), with
    one scale per row. The gradient is straight-through and quantized. The message consists of bytes
    viewed as bfloat16. You can send, receive or copy a message, but do not compute with it. Pass it
    to exactly one module, a `RowDequantize` with the same formats. The gradient of a message is
    also a message. The module also quantizes in eval mode. It has no parameters or state. Results
    are deterministic and bitwise the same on every backend. torch.compile is supported. Second
    derivatives and transforms of torch.func raise an error.

    Args:
        format: a name, a torch dtype, or a `RowFormat` without a density, such as "int4" or
            `RowFormat("int4", backward="sign")`.

    Raises:
        ValueError, TypeError: an argument is out of range.

    Source: this project, after the row-wise quantized exchange of FBGEMM.
    """

    def __init__(self, format: str | torch.dtype | RowFormat) -> None:
        super().__init__()
        self.format = _require_no_density("RowQuantize", format)

    def forward(self, x: Tensor) -> Tensor:
        checks.require_dense("RowQuantize", "x", x)
        if x.dim() == 0 or x.dtype not in checks.FLOATS:
            got = f"{x.dim()}-D {str(x.dtype).removeprefix('torch.')}"
            checks.fail("RowQuantize", "x", "float32, bfloat16 or float16, at least 1-D", got)
        width, dtype = x.shape[-1], x.dtype
        checks.require_int("RowQuantize", "x.shape[-1]", width, 1, 2**31 - 1)
        forward_format, backward_format = self.format.formats(dtype)
        size = _message_size(width, forward_format, backward_format)
        return with_gradient(
            "RowQuantize",
            x,
            lambda rows: _to_message(rows, forward_format, size),
            lambda grad: _from_message(grad, width, backward_format, dtype),
        )

    def extra_repr(self) -> str:
        return str(self.format)


class RowDequantize(nn.Module):
    """Dequantizes the message of a `RowQuantize` as the first module of the next stage.

    The result is [..., width]. Any bytes of the right length are a valid message. See
    `RowQuantize`.

    Args:
        width: the width d of the rows.
        format: the format of the `RowQuantize`.
        dtype: float32, bfloat16 or float16, the dtype of the result.

    Raises:
        ValueError, TypeError: an argument is out of range, or a message has the wrong length for
            the width and the formats.
    """

    def __init__(
        self, width: int, format: str | torch.dtype | RowFormat, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        checks.require_int("RowDequantize", "width", width, 1, 2**31 - 1)
        checks.require_dtype("RowDequantize", "dtype", dtype, checks.FLOATS)
        self.format = _require_no_density("RowDequantize", format)
        self.width, self.dtype = width, dtype

    def forward(self, message: Tensor) -> Tensor:
        checks.require_dense("RowDequantize", "message", message)
        width, dtype = self.width, self.dtype
        forward_format, backward_format = self.format.formats(dtype)
        size = _message_size(width, forward_format, backward_format)
        checks.require_dtype("RowDequantize", "dtype of message", message.dtype, (_CARRIER,))
        if message.dim() == 0 or message.shape[-1] != size:
            rule = f"shape [..., {size}] for width {width}"
            checks.fail("RowDequantize", "message", rule, list(message.shape), verb="have")
        return with_gradient(
            "RowDequantize",
            message,
            lambda sent: _from_message(sent, width, forward_format, dtype),
            lambda grad: _to_message(grad, backward_format, size),
        )

    def extra_repr(self) -> str:
        return f"width={self.width}, {self.format}, dtype={self.dtype}"


def _message_size(width: int, forward: str, backward: str) -> int:
    """The number of 2-byte elements in a message, which is the same for a row and its gradient."""
    longer = max(format_bytes(width, forward), format_bytes(width, backward))
    return (longer - 1) // _CARRIER.itemsize + 1


def _to_message(x: Tensor, format: str, size: int) -> Tensor:
    coded = quantize(as_rows(x), format)
    padding = size * _CARRIER.itemsize - coded.shape[1]
    return pad(coded, (0, padding)).view(_CARRIER).view(*x.shape[:-1], size)


def _from_message(message: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    coded = as_rows(message).view(torch.uint8)[:, : format_bytes(width, format)]
    return dequantize(coded, width, format, dtype).view(*message.shape[:-1], width)


def _require_no_density(op: str, format: str | torch.dtype | RowFormat) -> RowFormat:
    row_format = RowFormat.parse(op, format)
    if row_format.density is not None or row_format.forward is None:
        rule = "a number format without density (to send the largest entries, use RowPack)"
        checks.fail(op, "format", rule, row_format)
    return row_format
