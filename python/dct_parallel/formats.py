"""The names of number formats, for all entry points."""

import torch

from dct_kernels import checks
from dct_kernels.row_layout import FORMATS

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in checks.FLOATS}
ROW_FORMATS = (*DTYPES, *FORMATS)


def require_format(
    op: str, arg: str, format: str | torch.dtype, formats: tuple[str, ...], why: str = ""
) -> str:
    """Return the name of `format`, which is a name or a torch dtype.

    Raises an error unless the name is in `formats`. `why` is appended to the rule in the error.
    """
    if not isinstance(format, (str, torch.dtype)):
        raise TypeError(
            f"dct::{op}: {arg} must be a string or a torch.dtype, got {checks.shown(format)}"
        )
    name = next((name for name, dtype in DTYPES.items() if dtype == format), str(format))
    if name not in formats:
        raise ValueError(
            f"dct::{op}: {arg} must be {checks.either([repr(known) for known in formats]) + why}, "
            f"got {format!r}"
        )
    return name
