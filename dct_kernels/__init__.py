"""dct_kernels: fused kernels for Dynamic Communication Thresholding (arXiv 2010.08899).

The ops are in `torch.ops.dct`. The functions of this module call the same ops, after argument
checks with clear error messages.

Common to all ops
-----------------
- Tensors must be contiguous and on one device. An op must not write to memory of other arguments.
- All backends return bitwise equal results in every run, with any number of threads.
- Ops run on the current stream, without host synchronization or data-dependent shapes. So they work
  in CUDA graphs and in torch.compile(fullgraph=True). The eager backend is an exception: it may
  synchronize, so CUDA graphs cannot capture it.
- `row_pack`, `row_gather` and `row_unpack` support reverse-mode autograd. Forward mode and
  gradients by torch.func raise an error. An op that writes to an argument raises an error in
  torch.vmap. It also raises an error outside torch.no_grad() if that argument requires grad.
- Meta and fake tensors are supported.
- Empty tensors and tensors of more than 2**31 elements work. Subnormals are kept. The results for
  NaN and Inf are defined.
- Weight patches hold the entries of 16-bit weights whose bits changed. `patch_bytes` returns the
  size of a patch, and `patch_info` reads its header.
- A tensor may be split into R equal ranges of whole blocks of 16,384 elements. The last ranges may
  be short or empty. Each range has one threshold and one payload. `dct_kernels.layout.range_bounds`
  computes the offsets.
- `inv_scale` and `out_scale` are float32 tensors of one element on the device, for example the
  scale of a GradScaler without `.item()`.
- No access is out of bounds, even if payloads or positions are invalid.
- A wrong type or dtype raises TypeError, and a wrong value raises ValueError. The message is
  `dct::<op>: <argument> must <rule>, got <value>`. Nothing is written before the checks pass.

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
from .patch_layout import PatchInfo, patch_bytes, patch_info
from .patch_ops import checksum, diff_pack, patch_apply, patch_check
from .payload_ops import (
    dequantize_sum,
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

_load.setup()  # after the imports above have defined every op

__version__ = "0.3.0"

__all__ = ["PayloadInfo", "PayloadLayout", "backend_of", "payload_info", "payload_layout"]
__all__ += ["PatchInfo", "checksum", "diff_pack", "patch_apply", "patch_bytes", "patch_check"]
__all__ += ["patch_info"]
__all__ += ["dequantize_sum", "mask_pack", "quantize_pack"]
__all__ += ["quantized_payload_bytes", "sample_threshold", "scatter_unpack"]
__all__ += ["row_dequantize", "row_dequantize_sum", "row_gather", "row_pack", "row_quantize"]
__all__ += ["row_unpack"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
