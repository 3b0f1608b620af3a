"""The argument `format` of all exchanges of rows."""

import dataclasses

import torch
from torch import Tensor

from dct_kernels import checks

from ..formats import DTYPES, ROW_FORMATS, require_format
from .codecs import AllEntries, LargestEntries, RowCodec
from .transfer import Setting


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
