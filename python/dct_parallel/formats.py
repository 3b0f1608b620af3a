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
    checks.require_type(op, arg, format, (str, torch.dtype), "a string or a torch.dtype")
    name = next((name for name, dtype in DTYPES.items() if dtype == format), str(format))
    if name not in formats:
        checks.fail(op, arg, checks.either(list(map(repr, formats))) + why, repr(format))
    return name
