"""The eager backend: every op in simple PyTorch. It defines the results of all backends.

It may synchronize with the host. The other backends never do.
"""

from .patches import checksum, diff_pack, patch_apply, patch_check
from .payload import mask_pack, scatter_unpack
from .quantized_payload import dequantize_sum, quantize_pack
from .quantized_rows import row_dequantize, row_dequantize_sum, row_quantize
from .rows import row_gather, row_pack, row_unpack
from .thresholds import sample_threshold

__all__ = [
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
