"""Number formats of rows, for the tests of exchanges and of modules."""

import torch

from dct_kernels import row_dequantize, row_quantize
from dct_kernels.row_layout import row_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def through(x, format):
    """x after its conversion to a number format and back."""
    if format in DTYPES:
        return x.to(DTYPES[format]).to(x.dtype)
    return row_dequantize(row_quantize(x.contiguous(), format), x.shape[1], format, x.dtype)


def named_bytes(width, format):
    return width * DTYPES[format].itemsize if format in DTYPES else row_bytes(width, format)
