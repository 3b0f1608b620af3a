"""dct_kernels: fused kernels for Dynamic Communication Thresholding (arXiv 2010.08899).

The ops live in `torch.ops.dct`; the functions here are the same ops behind argument checks that
explain mistakes.

Common to all of them
---------------------
- Tensors are contiguous and on one device; arguments must not overlap in memory.
- Every backend gives bitwise the same answer, run to run, whatever the number of threads.
- No host synchronization, no data-dependent shape, current stream: safe in CUDA graphs and in
  torch.compile(fullgraph=True). The eager backend (no compiled kernels for the device) may
  synchronize, so on CUDA it cannot be captured.
- The row ops are differentiable, in reverse mode. Forward mode is refused, and so are a written
  argument that requires grad outside torch.no_grad() and torch.vmap of an op that writes.
- Meta and fake tensors give shapes and dtypes.
- numel 0 is legal, numel above 2**31 works, subnormals are kept, NaN and Inf are defined.
- R ranges are equal, of whole blocks of 16,384 elements, in order; the last ones may be short or
  empty. Each range has one threshold and one payload. `dct_kernels.layout.range_bounds` computes
  their offsets.
- `inv_scale` and `out_scale` are float32 tensors of one element on the device, a GradScaler's scale
  without `.item()`.
- Whatever tensors hold, no access is out of bounds.
- Errors: TypeError for a wrong type or dtype, ValueError for a wrong value, worded
  `dct::<op>: <argument> must be <rule>, got <value>`. Nothing is written before the checks pass.

docs/reference/ops.md has the details.
"""

from . import _load
from ._load import backend_of
from .layout import (
    PayloadInfo,
    PayloadLayout,
    payload_info,
    payload_layout,
    quantized_payload_bytes,
)
from .payload_ops import (
    dequantize_sum,
    dequantize_sum_pack,
    mask_pack,
    quantize_pack,
    sample_threshold,
    scatter_unpack,
)
from .row_ops import (
    row_dequantize,
    row_dequantize_sum,
    row_gather,
    row_pack,
    row_quantize,
    row_unpack,
)

_load.setup()  # every op is defined

__version__ = "0.3.0"

__all__ = ["PayloadInfo", "PayloadLayout", "backend_of", "payload_info", "payload_layout"]
__all__ += ["dequantize_sum", "dequantize_sum_pack", "mask_pack", "quantize_pack"]
__all__ += ["quantized_payload_bytes", "sample_threshold", "scatter_unpack"]
__all__ += ["row_dequantize", "row_dequantize_sum", "row_gather", "row_pack", "row_quantize"]
__all__ += ["row_unpack"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
