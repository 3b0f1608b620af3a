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
        checks.fail(op, arg, "a string or a torch.dtype", checks.shown(format), TypeError)
    name = next((name for name, dtype in DTYPES.items() if dtype == format), str(format))
    if name not in formats:
        rule = checks.either([repr(known) for known in formats]) + why
        checks.fail(op, arg, rule, repr(format))
    return name
