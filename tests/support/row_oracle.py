"""Row formats, for the tests of row exchanges and modules."""

import torch

from dct_kernels import row_dequantize, row_quantize
from dct_kernels.row_layout import row_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def through(x, format):
    """Convert x to a format and back."""
    if format in DTYPES:
        return x.to(DTYPES[format]).to(x.dtype)
    return row_dequantize(row_quantize(x.contiguous(), format), x.shape[1], format, x.dtype)


def named_bytes(width, format):
    return width * DTYPES[format].itemsize if format in DTYPES else row_bytes(width, format)
