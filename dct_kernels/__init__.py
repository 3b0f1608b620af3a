"""dct_kernels: fused kernels for Dynamic Communication Thresholding (arXiv 2010.08899).

The ops live in `torch.ops.dct`; the functions here are the same ops behind argument checks.
"""

from . import _autograd, _load  # noqa: F401  (registers)

_load.setup()

from ._load import backend_of  # noqa: E402
from .layout import (  # noqa: E402
    PayloadInfo,
    PayloadLayout,
    payload_info,
    payload_layout,
    quantized_payload_bytes,
)
from .ops import (  # noqa: E402
    dequantize_sum,
    dequantize_sum_pack,
    mask_pack,
    quantize_pack,
    row_dequantize,
    row_gather,
    row_pack,
    row_quantize,
    row_unpack,
    sample_threshold,
    scatter_unpack,
)

__version__ = "0.3.0"

__all__ = [
    "PayloadInfo",
    "PayloadLayout",
    "backend_of",
    "dequantize_sum",
    "dequantize_sum_pack",
    "mask_pack",
    "payload_info",
    "payload_layout",
    "quantize_pack",
    "quantized_payload_bytes",
    "row_dequantize",
    "row_gather",
    "row_pack",
    "row_quantize",
    "row_unpack",
    "sample_threshold",
    "scatter_unpack",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
