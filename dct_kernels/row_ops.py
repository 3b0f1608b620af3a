"""The ops on rows: the k largest entries of each row, or all entries quantized.

The body of each function only checks its arguments. The decorator `define` adds the call of the op.
"""

# mypy: disable-error-code="return"

import torch
from torch import Tensor

from . import checks, row_layout
from ._ops import define
from .checks import FLOATS, UINT8


@define(
    "(Tensor x, SymInt k, ScalarType value_dtype) -> (Tensor values, Tensor positions)",
    lambda x, k, value_dtype: (
        x.new_empty(x.shape[0], k, dtype=value_dtype),
        x.new_empty(x.shape[0], row_layout.position_bytes(x.shape[1], k), dtype=torch.uint8),
    ),
    differentiable=True,
)
def row_pack(x: Tensor, k: int, value_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the k entries of largest magnitude per row. Differentiable in x.

    The result has exactly k entries per row, in column order. If magnitudes are equal, the op
    selects the lower column. NaN ranks as infinity. The gradient of x is computed by `row_unpack`
    at the same positions.

    Args:
        x: float32, bfloat16 or float16 [B, d].
        k: entries kept per row, 1 to d.
        value_dtype: float32, bfloat16 or float16; values are rounded as `.to(value_dtype)` does.

    Returns:
        values [B, k] of value_dtype, and positions uint8 [B, w] in the smallest of three encodings:
        a bitmap (ceil(d / 8) bytes, least significant bit first), uint8 columns (d <= 256) or
        little-endian uint16 columns (d <= 65,536). If two encodings have the same size, the op uses
        the one that comes first in this list. The encoding depends only on d and k.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: DCT (arXiv 2010.08899), model-parallel part. Exact top-k per row is our reconstruction.

    >>> row_pack(torch.tensor([[0.0, -2.0, 1.0, 3.0]]), 2, torch.float32)
    (tensor([[-2.,  3.]]), tensor([[10]], dtype=torch.uint8))
    """
    _require_top_k("row_pack", x, k, value_dtype)


@define(
    "(Tensor x, Tensor positions, SymInt k, ScalarType value_dtype) -> Tensor",
    lambda x, positions, k, value_dtype: x.new_empty(x.shape[0], k, dtype=value_dtype),
    differentiable=True,
)
def row_gather(x: Tensor, positions: Tensor, k: int, value_dtype: torch.dtype) -> Tensor:
    """Return the entries of x at the positions of an earlier `row_pack`.

    The op validates positions. It accepts a column if the column is less than d and greater than
    all columns that were accepted before in the same row. For any other column, the result is 0. In
    a bitmap, set bits after the k-th are ignored. The gradient of x is computed by `row_unpack` at
    the same positions.

    Args:
        x: float32, bfloat16 or float16 [B, d].
        positions: uint8 [B, w] for this d and k.
        k: entries per row, 1 to d.
        value_dtype: float32, bfloat16 or float16.

    Returns:
        [B, k] of value_dtype.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: DCT (arXiv 2010.08899), model-parallel part, which uses one mask for both directions.

    >>> row_gather(torch.tensor([[0.0, 5.0, 6.0, 7.0]]), torch.tensor([[10]], dtype=torch.uint8), 2,
    ...            torch.float32)
    tensor([[5., 7.]])
    """
    _require_top_k("row_gather", x, k, value_dtype)
    _require_positions("row_gather", positions, x.shape[1], k, ("x", x))


@define(
    "(Tensor values, Tensor positions, SymInt width, ScalarType dtype) -> Tensor",
    lambda values, positions, width, dtype: values.new_empty(values.shape[0], width, dtype=dtype),
    differentiable=True,
)
def row_unpack(values: Tensor, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Scatter packed rows to their columns, with zeros elsewhere. Differentiable in values.

    The op validates positions like `row_gather`, and skips a column that is not accepted. The
    gradient of values is computed by `row_gather` at the same positions.

    Args:
        values: float32, bfloat16 or float16 [B, k].
        positions: uint8 [B, w] for this width and k.
        width: number of columns of the result, at least k.
        dtype: dtype of the result, float32, bfloat16 or float16.

    Returns:
        [B, width] of dtype.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: DCT (arXiv 2010.08899), model-parallel part.

    >>> row_unpack(torch.tensor([[5.0, 7.0]]), torch.tensor([[10]], dtype=torch.uint8), 4,
    ...            torch.float32)
    tensor([[0., 5., 0., 7.]])
    """
    op = "row_unpack"
    checks.require_tensor(op, "values", values, FLOATS, (2,))
    checks.require_int(op, "width", width, 1, 2**31 - 1)
    checks.require_int(op, "values.shape[1]", values.shape[1], 1, width)
    checks.require_dtype(op, "dtype", dtype, FLOATS)
    _require_positions(op, positions, width, values.shape[1], ("values", values))


@define(
    "(Tensor x, str format) -> Tensor",
    lambda x, format: x.new_empty(
        x.shape[0], row_layout.row_bytes(x.shape[1], format), dtype=torch.uint8
    ),
)
def row_quantize(x: Tensor, format: str) -> Tensor:
    """Quantize all entries of every row, with one scale per row. Not differentiable.

    Formats, with bytes per row in parentheses (docs/reference/ops.md specifies every bit):

    - "int8" (d + 2) and "int4" (ceil(d / 2) + 2): the scale maps the largest magnitude of a
      row to 127 or 7, respectively.
    - "sign" (ceil(d / 8) + 2): all entries become plus or minus the mean of all magnitudes.

    If a row contains a NaN or an infinity, all its dequantized entries are NaN. If the scale of a
    row is below 2**-126, all its dequantized entries are zeros.

    Args:
        x: float32, bfloat16 or float16 [B, d], d in 1 to 2**31 - 1.
        format: one of the formats above.

    Returns:
        uint8 [B, w], w = dct_kernels.row_layout.row_bytes(d, format).

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: row-wise quantized exchange is from FBGEMM, and sign from signSGD with a scale (arXiv
    1901.09847). The bfloat16 scale and the order-independent sums are our reconstruction.

    >>> row_quantize(torch.tensor([[0.0, -2.0, 1.0, 7.0]]), "int4")
    tensor([[224, 113, 128,  63]], dtype=torch.uint8)
    """
    op = "row_quantize"
    checks.require_tensor(op, "x", x, FLOATS, (2,))
    checks.require_int(op, "x.shape[1]", x.shape[1], 1, 2**31 - 1)
    checks.require_choice(op, "format", format, row_layout.FORMATS)


@define(
    "(Tensor rows, SymInt width, str format, ScalarType dtype) -> Tensor",
    lambda rows, width, format, dtype: rows.new_empty(rows.shape[0], width, dtype=dtype),
)
def row_dequantize(rows: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    """Dequantize the rows of `row_quantize`. Not differentiable.

    An entry is its code times the scale, rounded once. Rows need no validation, because all bytes
    can be decoded (docs/reference/ops.md).

    Args:
        rows: uint8 [B, w] for this width and format, at any address.
        width: number of columns of the result, 1 to 2**31 - 1.
        format: as given to `row_quantize`.
        dtype: dtype of the result, float32, bfloat16 or float16. Values are rounded as `.to(dtype)`
            does, so float16 overflows to infinity.

    Returns:
        [B, width] of dtype.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: see `row_quantize`.

    >>> row_dequantize(torch.tensor([[224, 113, 128, 63]], dtype=torch.uint8), 4, "int4",
    ...                torch.float32)
    tensor([[ 0., -2.,  1.,  7.]])
    """
    _require_quantized("row_dequantize", rows, 2, width, format, dtype)


@define(
    "(Tensor rows, SymInt width, str format, ScalarType dtype) -> Tensor",
    lambda rows, width, format, dtype: rows.new_empty(rows.shape[1], width, dtype=dtype),
)
def row_dequantize_sum(rows: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    """Sum the quantized rows of P ranks in rank order, in one pass. Not differentiable.

    The op sums the results of `row_dequantize` in float32, and rounds the sum once to dtype. The
    sum starts with the value of the first rank instead of 0, to keep the sign of -0.0. With P = 1,
    the op is equivalent to `row_dequantize`. Rows need no validation.

    Args:
        rows: uint8 [P, B, w] for this width and format, P at least 1, at any address. For
            example, the result of an all-to-all in which each of P ranks sent B rows to this rank.
        width: number of columns of the result, 1 to 2**31 - 1.
        format: as given to `row_quantize`.
        dtype: dtype of the result, float32, bfloat16 or float16, rounded as `.to(dtype)` does.

    Returns:
        [B, width] of dtype.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Source: see `row_quantize`. The sum in rank order is our reconstruction of a reduce-scatter.

    >>> rows = torch.tensor([[[224, 113, 128, 63]], [[1, 0, 128, 63]]], dtype=torch.uint8)
    >>> row_dequantize_sum(rows, 4, "int4", torch.float32)
    tensor([[ 1., -2.,  1.,  7.]])
    """
    op = "row_dequantize_sum"
    _require_quantized(op, rows, 3, width, format, dtype)
    checks.require_int(op, "rows.shape[0]", rows.shape[0], 1, 2**31 - 1)


def _require_quantized(
    op: str, rows: Tensor, dims: int, width: int, format: str, dtype: torch.dtype
) -> None:
    checks.require_tensor(op, "rows", rows, UINT8, (dims,))
    checks.require_int(op, "width", width, 1, 2**31 - 1)
    checks.require_choice(op, "format", format, row_layout.FORMATS)
    checks.require_dtype(op, "dtype", dtype, FLOATS)
    row_bytes = row_layout.row_bytes(width, format)
    if rows.shape[-1] != row_bytes:
        rule = f"{row_bytes} bytes per row for width {width} and format {format}"
        checks.fail(op, "rows", rule, rows.shape[-1], verb="have")


def _require_top_k(op: str, x: Tensor, k: int, value_dtype: torch.dtype) -> None:
    checks.require_tensor(op, "x", x, FLOATS, (2,))
    checks.require_int(op, "k", k, 1, x.shape[1])
    checks.require_dtype(op, "value_dtype", value_dtype, FLOATS)


def _require_positions(
    op: str, positions: Tensor, width: int, k: int, like: tuple[str, Tensor]
) -> None:
    checks.require_tensor(op, "positions", positions, UINT8, (2,), like)
    shape = [like[1].shape[0], row_layout.position_bytes(width, k)]
    if list(positions.shape) != shape:
        rule = f"shape {shape} for width {width} and k {k}"
        checks.fail(op, "positions", rule, list(positions.shape), verb="have")
