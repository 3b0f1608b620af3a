"""Codecs between rows and messages: the largest entries of a row, or all entries.

A codec is used for one exchange. It encodes the rows to send, decodes the received rows, and later
does the same for their gradients. Its arguments determine the sizes of messages.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from dct_kernels import checks, row_gather, row_pack, row_unpack
from dct_kernels.row_layout import position_bytes, row_bytes

from ..formats import DTYPES, ROW_FORMATS, require_format
from .packing import row_k
from .transfer import Setting

# Without the checks of dct_kernels.row_quantize, which Dynamo does not trace in a backward pass.
_ops = torch.ops.dct


class RowCodec:
    """Encodes rows [B, width] and their gradients. The base class leaves rows unchanged.

    Subclasses encode rows as uint8 [B, message_bytes], and gradients as [B, gradient_bytes].
    """

    message_bytes: int
    gradient_bytes: int

    def encode(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        return message

    def encode_gradient(self, grad: Tensor) -> Tensor:
        """Encode the gradient of the result of `decode`."""
        return grad.contiguous()

    def decode_gradient(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode the gradient of the argument of `encode`."""
        return message

    def decode_gradient_sum(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of P ranks' gradients [P, B, gradient_bytes], in rank order and in float32."""
        decoded = (self.decode_gradient(message, torch.float32) for message in messages)
        return _sum(decoded).to(dtype)


class LargestEntries(RowCodec):
    """Sends the k largest entries of a row with positions, and gradients without positions."""

    def __init__(self, width: int, density: float, value_dtype: torch.dtype) -> None:
        self._width, self._k, self._value_dtype = width, row_k(width, density), value_dtype
        self.gradient_bytes = self._k * value_dtype.itemsize
        self.message_bytes = self.gradient_bytes + position_bytes(width, self._k)

    def encode(self, x: Tensor) -> Tensor:
        values, self._sent = row_pack(x, self._k, self._value_dtype)
        return torch.cat([_as_bytes(values), self._sent], 1)  # for one collective instead of two

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        self._received = message[:, self.gradient_bytes :].contiguous()
        values = _as_floats(message[:, : self.gradient_bytes], self._value_dtype)
        return row_unpack(values, self._received, self._width, dtype)

    def encode_gradient(self, grad: Tensor) -> Tensor:
        return _as_bytes(row_gather(grad, self._received, self._k, self._value_dtype))

    def decode_gradient(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        return row_unpack(_as_floats(message, self._value_dtype), self._sent, self._width, dtype)


class AllEntries(RowCodec):
    """Sends all entries of a row. Rows and gradients may have different number formats."""

    def __init__(self, width: int, forward: str, backward: str) -> None:
        self._width, self._forward, self._backward = width, forward, backward
        self.message_bytes = format_bytes(width, forward)
        self.gradient_bytes = format_bytes(width, backward)

    def encode(self, x: Tensor) -> Tensor:
        return quantize(x, self._forward)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize(message, self._width, self._forward, dtype)

    def encode_gradient(self, grad: Tensor) -> Tensor:
        return quantize(grad, self._backward)

    def decode_gradient(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize(message, self._width, self._backward, dtype)

    def decode_gradient_sum(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_sum(messages, self._width, self._backward, dtype)


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """The format in which an exchange sends rows: all or only the largest entries. Immutable.

    Exchanges also accept a plain name or dtype, which means `RowFormat(name)`.

    Args:
        forward: number format of rows: "float32", "bfloat16", "float16" or a torch dtype, or a
            quantized format: "int8", "int4" or "sign" (see `dct_kernels.row_quantize`).
            None: the dtype of the rows.
        backward: number format of gradients; default: `forward`.
        density: in (0, 1]. The exchange sends only the k = ceil(density * d) largest entries of
            each row, and only their gradients (DCT, model-parallel, arXiv 2010.08899). `forward`
            must then be a dtype or None and applies to both directions, and `backward` is None.

    Raises:
        ValueError, TypeError: an argument is out of range.

    >>> RowFormat("int4", backward="sign")
    RowFormat(forward='int4', backward='sign', density=None)
    """

    forward: str | torch.dtype | None = None
    backward: str | torch.dtype | None = None
    density: float | None = None

    def __post_init__(self) -> None:
        op, formats, why = "RowFormat", ROW_FORMATS, ""
        if self.density is not None:
            checks.require_density(op, self.density)
            if self.backward is not None:
                checks.fail(op, "backward", "None with a density", repr(self.backward))
            formats, why = tuple(DTYPES), " with a density"
            # A float, so that errors show the densities of other ranks as fractions.
            object.__setattr__(self, "density", float(self.density))
        for arg in ("forward", "backward"):
            given = getattr(self, arg)
            if given is not None:
                object.__setattr__(self, arg, require_format(op, arg, given, formats, why))

    @staticmethod
    def parse(op: str, format: "str | torch.dtype | RowFormat") -> "RowFormat":
        """Convert the argument `format` of `op` to a RowFormat."""
        if isinstance(format, RowFormat):
            return format
        return RowFormat(require_format(op, "format", format, ROW_FORMATS))

    def formats(self, dtype: torch.dtype) -> tuple[str, str]:
        """The names of the forward and the backward format for rows with this dtype."""
        forward = str(self.forward or dtype).removeprefix("torch.")
        return forward, str(self.backward or forward)

    def settings_to_compare(self, x: Tensor) -> dict[str, Setting]:
        """The settings that must be the same on every rank, for rows `x`."""
        formats = ", ".join(dict.fromkeys(self.formats(x.dtype)))
        needs_grad = x.requires_grad and torch.is_grad_enabled()
        return {"density": self.density, "format": formats, "requires_grad": needs_grad}

    def codec(self, width: int, dtype: torch.dtype) -> RowCodec:
        """Create a codec for one exchange of rows with this width and dtype."""
        forward, backward = self.formats(dtype)
        if self.density is None:
            return AllEntries(width, forward, backward)
        return LargestEntries(width, self.density, DTYPES[forward])


def format_bytes(width: int, format: str) -> int:
    """The size in bytes of a row with `width` entries in a number format."""
    return width * DTYPES[format].itemsize if format in DTYPES else row_bytes(width, format)


def quantize(x: Tensor, format: str) -> Tensor:
    """Encode rows [B, d] as uint8 [B, format_bytes(d, format)]."""
    if format in DTYPES:
        return _as_bytes(x.to(DTYPES[format]))
    coded: Tensor = _ops.row_quantize.default(x, format)
    return coded


def dequantize(message: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    """Decode rows [B, width] in `dtype` from the result of `quantize`."""
    if format in DTYPES:
        return _as_floats(message, DTYPES[format]).to(dtype)
    rows: Tensor = _ops.row_dequantize.default(message.contiguous(), width, format, dtype)
    return rows


def dequantize_sum(messages: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    """The sum of P ranks' rows [P, B, bytes of `quantize`], in rank order and in float32."""
    if format in DTYPES:
        decoded = (dequantize(message, width, format, torch.float32) for message in messages)
        return _sum(decoded).to(dtype)
    total: Tensor = _ops.row_dequantize_sum.default(messages, width, format, dtype)
    return total


def _sum(rows: Iterator[Tensor]) -> Tensor:
    total = next(rows)  # not added to 0, which would lose the sign of -0.0
    for more in rows:
        total += more
    return total


def _as_bytes(values: Tensor) -> Tensor:
    # Flatten first, because an op may return strides that cannot be viewed if there are no rows.
    nbytes = values.shape[1] * values.itemsize
    return values.flatten().view(torch.uint8).view(values.shape[0], nbytes)  # len() is not dynamic


def _as_floats(message: Tensor, dtype: torch.dtype) -> Tensor:
    # clone() copies even a single row, which may be misaligned. contiguous() would not copy it.
    return message.clone(memory_format=torch.contiguous_format).view(dtype)
