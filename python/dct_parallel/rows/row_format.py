"""What is sent of a row and of its gradient: the one argument `format` of all exchanges of rows."""

import dataclasses

import torch

from dct_kernels import checks

from ..formats import DTYPES, require_format
from .codecs import EveryEntry, LargestEntries, RowCodec
from .transfer import ROW_FORMATS, Setting


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How rows are sent: every entry, or only the largest ones. Immutable, and the same each time.

    A plain name or dtype means `RowFormat(name)` wherever an exchange takes a format.

    Args:
        forward: number format of rows: "float32", "bfloat16", "float16" or the torch dtype; or few
            bits, "int8", "int4", "ternary" or "sign" (see `dct_kernels.row_quantize`). None: the
            rows' own dtype.
        backward: of their gradients; default `forward`.
        density: only the k = ceil(density * d) largest entries of each row are sent, in (0, 1], and
            their gradients back: DCT, model-parallel side (arXiv 2010.08899). `forward` is then one
            of the dtypes, for both ways.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.

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
            object.__setattr__(self, "density", float(self.density))  # ranks tell it as one
        for arg in ("forward", "backward"):
            given = getattr(self, arg)
            if given is not None:
                name = require_format(op, arg, given, formats, why)
                object.__setattr__(self, arg, name)  # frozen from here on

    @staticmethod
    def of(op: str, format: "str | torch.dtype | RowFormat") -> "RowFormat":
        """From the argument `format` of `op`, which errors name."""
        if isinstance(format, RowFormat):
            return format
        return RowFormat(require_format(op, "format", format, ROW_FORMATS))

    def told(self, dtype: torch.dtype) -> dict[str, Setting]:
        """What ranks compare, for rows of `dtype`."""
        return {"density": self.density, "format": ", ".join(dict.fromkeys(self.both(dtype)))}

    def both(self, dtype: torch.dtype) -> tuple[str, str]:
        """The names of both formats, of rows of `dtype`."""
        forward = str(self.forward or dtype).removeprefix("torch.")
        return forward, str(self.backward or forward)

    def codec(self, width: int, dtype: torch.dtype) -> RowCodec:
        """The codec of one exchange, for rows of `width` and `dtype`."""
        forward, backward = self.both(dtype)
        if self.density is None:
            return EveryEntry(width, forward, backward)
        return LargestEntries(width, self.density, DTYPES[forward])
