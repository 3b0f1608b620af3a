"""The Triton backend, which needs no CUDA compiler. One file per op, or per two ops.

Each file has the kernels, then the host function that launches them. A host function receives
checked arguments, does not wait for its kernels, allocates memory only through torch, and keeps no
state between calls.
"""

from ._launch import INTERPRETED
from .dequantize_sum import dequantize_sum
from .diff_pack import checksum, diff_pack
from .mask_pack import mask_pack
from .patch_apply import patch_apply, patch_check
from .quantize_pack import quantize_pack
from .row_dequantize import row_dequantize
from .row_dequantize_sum import row_dequantize_sum
from .row_gather import row_gather
from .row_pack import row_pack
from .row_quantize import row_quantize
from .row_unpack import row_unpack
from .sample_threshold import sample_threshold
from .scatter_unpack import scatter_unpack

__all__ = [
    "INTERPRETED",
    "checksum",
    "dequantize_sum",
    "diff_pack",
    "mask_pack",
    "patch_apply",
    "patch_check",
    "quantize_pack",
    "row_dequantize",
    "row_dequantize_sum",
    "row_gather",
    "row_pack",
    "row_quantize",
    "row_unpack",
    "sample_threshold",
    "scatter_unpack",
]
