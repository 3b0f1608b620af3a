"""Packs the k largest entries of each row of activations, and unpacks them."""

import math

import torch
from torch import Tensor, nn

import dct_kernels
from dct_kernels import checks

from ..formats import DTYPES, require_format


def require_rows(op: str, x: Tensor) -> Tensor:
    """Return `x` [B, d] as a contiguous tensor. Raise if its type, shape or device is wrong."""
    checks.require_dense(op, "x", x)
    if x.device.type not in ("cpu", "cuda"):
        checks.fail(op, "x", "on the CPU or CUDA", x.device)
    x = x.contiguous()
    checks.require_tensor(op, "x", x, checks.FLOATS, (2,))
    return x


def as_rows(tensor: Tensor) -> Tensor:
    """Reshape a tensor [..., d] to contiguous [B, d], as the ops require."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1]).contiguous()


def row_k(width: int, density: float) -> int:
    """The number of entries kept per row: ceil(density * width), from 1 to `width`."""
    return min(max(math.ceil(float(density) * width), 1), width)


def pack_rows(x: Tensor, k: int, format: str | torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return the k entries with the largest magnitude of each row, and their positions.

    Differentiable in x. Rows are along the last dimension. The gradient of x is the gradient of
    the values at the same positions, and 0 elsewhere. So a transport sends both tensors in the
    forward pass, and only the gradient of the values in the backward pass. There is no error
    feedback, because rows of different samples are unrelated. If magnitudes are equal, the lower
    column is selected. The result is deterministic and bitwise the same on every backend. CUDA
    graphs and torch.compile are supported as for `dct_kernels.row_pack`.

    Args:
        x: float32, bfloat16 or float16 [..., d], not mutated.
        k: number of entries kept per row, from 1 to d. k = d reproduces x bit for bit, except that
            every NaN becomes the canonical NaN.
        format: the format of the values: "float32", "bfloat16", "float16" or a torch dtype;
            default: the dtype of x.

    Returns:
        values [..., k] in the dtype of `format`, in column order, and positions uint8 [..., w]; see
        `dct_kernels.row_pack`.

    Raises:
        ValueError, TypeError: an argument is out of range.

    Source: DCT, model-parallel (arXiv 2010.08899). The paper uses a threshold. This project keeps
    exactly k entries per row, so that the size of every message is known in advance.

    >>> pack_rows(torch.tensor([0.0, -2.0, 1.0, 3.0]), 2)
    (tensor([-2.,  3.]), tensor([10], dtype=torch.uint8))
    """
    rows = _rows("pack_rows", "x", x)
    dtype = x.dtype if format is None else DTYPES[_require_dtype("pack_rows", format)]
    values, positions = dct_kernels.row_pack(rows, k, dtype)
    leading = x.shape[:-1]
    return values.view(*leading, k), positions.view(*leading, positions.shape[1])


def unpack_rows(
    values: Tensor, positions: Tensor, width: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Restore rows from the result of `pack_rows`, with zeros in all other positions.

    Differentiable in values. Their gradient is gathered from the same positions. Invalid positions
    are ignored (see `dct_kernels.row_gather`). The result is deterministic. CUDA graphs and
    torch.compile are supported as for `dct_kernels.row_unpack`.

    Args:
        values: float32, bfloat16 or float16 [..., k].
        positions: uint8 [..., w], from `pack_rows`, with the same leading dimensions as values.
        width: the width d of the packed rows.
        dtype: the dtype of the result; default: the dtype of the values.

    Returns:
        [..., width] in dtype.

    Raises:
        ValueError, TypeError: an argument is out of range.

    >>> unpack_rows(torch.tensor([-2.0, 3.0]), torch.tensor([10], dtype=torch.uint8), 4)
    tensor([ 0., -2.,  0.,  3.])
    """
    rows = _rows("unpack_rows", "values", values), _rows("unpack_rows", "positions", positions)
    leading, found = list(values.shape[:-1]), list(positions.shape)
    if found[:-1] != leading:
        rule = f"shape [{', '.join(map(str, [*leading, 'w']))}] for values of shape"
        checks.fail("unpack_rows", "positions", f"{rule} {list(values.shape)}", found, verb="have")
    dtype = values.dtype if dtype is None else dtype
    return dct_kernels.row_unpack(*rows, width, dtype).view(*leading, width)


class RowPack(nn.Module):
    """Applies `pack_rows` as the last module of a stage: [..., d] to (values, positions).

    It has no parameters and no state. It also compresses in eval mode, because a model that was
    trained with compressed rows expects compressed rows. With `inference=False`, eval mode sends
    all entries in x's dtype.

    Args:
        density: fraction of each row to keep, in (0, 1]; k = ceil(density * d).
        k: number of entries of each row to keep, instead of a density.
        format: the format of the values; see `pack_rows`.
        inference: also compress in eval mode.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    @checks.names_keywords
    def __init__(
        self,
        density: float | None = None,
        *,
        k: int | None = None,
        format: str | torch.dtype | None = None,
        inference: bool = True,
    ) -> None:
        super().__init__()
        if (density is None) == (k is None):
            rule = "exactly one of density and k must be given"
            raise ValueError(f"dct::RowPack: {rule}, got density {density} and k {k}")
        if density is not None:
            checks.require_density("RowPack", density)
        else:
            checks.require_int("RowPack", "k", k, 1, 2**31 - 1)
        if format is not None:
            format = _require_dtype("RowPack", format)
        checks.require_type("RowPack", "inference", inference, bool, "a bool")
        self.density, self.k, self.format, self.inference = density, k, format, inference

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _require_rows("RowPack", "x", x)
        if not (self.training or self.inference):
            return pack_rows(x, x.shape[-1])
        k = self.k if self.density is None else row_k(x.shape[-1], self.density)
        assert k is not None  # exactly one of density and k is None
        return pack_rows(x, k, self.format)

    def extra_repr(self) -> str:
        kept = f"k={self.k}" if self.k else f"density={self.density}"
        return f"{kept}, format={self.format}, inference={self.inference}"


class RowUnpack(nn.Module):
    """Applies `unpack_rows` as the first module of the next stage: (values, positions) to rows.

    It infers k from the values, so it works with a `RowPack` in training and eval mode.

    Args:
        width: the width d of the packed rows.
        dtype: float32, bfloat16 or float16, the dtype of the result; default: the values' dtype.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    def __init__(self, width: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        checks.require_int("RowUnpack", "width", width, 1, 2**63 - 1)
        if dtype is not None:
            checks.require_dtype("RowUnpack", "dtype", dtype, checks.FLOATS)
        self.width, self.dtype = width, dtype

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:
        return unpack_rows(values, positions, self.width, self.dtype)

    def extra_repr(self) -> str:
        return f"width={self.width}, dtype={self.dtype}"


def _require_dtype(op: str, format: str | torch.dtype) -> str:
    return require_format(op, "format", format, tuple(DTYPES))


def _rows(op: str, arg: str, tensor: Tensor) -> Tensor:
    _require_rows(op, arg, tensor)
    return as_rows(tensor)


def _require_rows(op: str, arg: str, tensor: Tensor) -> None:
    checks.require_dense(op, arg, tensor)
    if tensor.dim() == 0:
        checks.fail(op, arg, "at least 1-D", "0-D")
