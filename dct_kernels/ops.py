"""The public functions: the ops of `torch.ops.dct` behind checks that explain mistakes.

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

import torch
from torch import Tensor

from . import _ops


def sample_threshold(
    grad: Tensor,
    residual: Tensor,
    density: float,
    ranges: int = 1,
    max_samples: int = 65536,
    seed: int = 0,
    inv_scale: Tensor | None = None,
) -> Tensor:
    """For each range, the magnitude that a fraction `density` of its entries reaches.

    Looks at |residual + grad * inv_scale|. For a range of up to `max_samples` elements the result
    is the exact k-th largest magnitude, k = clamp(ceil(density * n), 1, n). A longer range is
    sampled: one hashed pick in each of `max_samples` equal strata. docs/reference/ops.md has the
    error of a sampled threshold.

    Args:
        grad: float32, bfloat16 or float16 [numel].
        residual: float32 [numel].
        density: fraction to select, in (0, 1].
        ranges: number of ranges R, 1 to 2**31 - 1.
        max_samples: samples per range, 1 to 2**31 - 1.
        seed: of the picks, taken modulo 2**32. Frozen by a CUDA graph.
        inv_scale: float32, one element, or None.

    Returns:
        float32 [R]. NaN ranks as infinity; an empty range gives +inf.

    Raises:
        ValueError, TypeError: an argument breaks its rule.

    Source: DCT (arXiv 2010.08899) sets a threshold once in thousands of steps; sampling it is DGC's
    idea (arXiv 1712.01887), the stratified hash ours.

    >>> sample_threshold(torch.arange(10.0), torch.zeros(10), density=0.2)
    tensor([8.])
    """
    threshold: Tensor = _ops.sample_threshold(
        grad, residual, density, ranges, max_samples, seed, inv_scale
    )
    return threshold


def mask_pack(
    residual: Tensor,
    grad: Tensor,
    threshold: Tensor,
    payload: Tensor,
    seen: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    inv_scale: Tensor | None = None,
) -> None:
    """Error feedback, threshold mask and compaction in one pass over memory.

    acc = residual + grad * inv_scale. An entry passes if not (|acc| < the threshold of its range)
    and acc != 0, so NaN and Inf always pass and zeros never. The first `capacity` entries that pass
    in a range go into its payload in ascending order. The residual becomes acc - value for them and
    acc for all others, so value + residual == acc, bit for bit: an entry that does not fit is sent
    later. Where acc is not finite the residual keeps its old value (0 if that is not finite). A
    threshold that is negative or NaN lets every entry pass that is not zero. Mutates `residual`,
    `payload` and `seen`.

    Args:
        residual: float32 [numel], read and written.
        grad: float32, bfloat16 or float16 [numel].
        threshold: float32 [R].
        payload: uint8 [nbytes] or [R, nbytes], 16-byte aligned, nbytes from `payload_layout`. Bytes
            past the entries are kept.
        seen: int32 [R], written: how many entries passed, packed or not; at most 2**31 - 1.
        capacity: the most entries that each payload holds, 1 to 2**32 - 1.
        value_dtype: torch.float32, or torch.bfloat16 (nearest even; a finite acc that would round
            to infinity saturates).
        inv_scale: float32, one element, or None.

    Raises:
        ValueError, TypeError: an argument breaks its rule.

    Source: DCT (arXiv 2010.08899), data-parallel side; the payload is ours.

    >>> residual, grad = torch.zeros(4), torch.tensor([0.1, -3.0, 0.2, 5.0])
    >>> layout = payload_layout(4, capacity=2, value_dtype=torch.float32)
    >>> payload = torch.empty(layout.nbytes, dtype=torch.uint8)
    >>> seen = torch.empty(1, dtype=torch.int32)
    >>> mask_pack(residual, grad, torch.tensor([1.0]), payload, seen, 2, torch.float32)
    >>> residual, seen
    (tensor([0.1000, 0.0000, 0.2000, 0.0000]), tensor([2], dtype=torch.int32))
    """
    _ops.mask_pack(residual, grad, threshold, payload, seen, capacity, value_dtype, inv_scale)


def scatter_unpack(
    payloads: Tensor,
    out: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    scale: float = 1.0,
    out_scale: Tensor | None = None,
) -> Tensor:
    """Sum P ranks' payloads into a dense tensor, in rank order: every rank computes the same bits.

    out[i] = +0.0 + factor * sum: the sum in float32 over ranks in order from +0.0, factor =
    float32(scale) * out_scale, rounded once to out's dtype. If a payload says both "overflow" and
    "non-finite", element 0 of its range becomes NaN. Payloads are not trusted: a payload with a bad
    header is ignored, and a bad block adds nothing. Mutates `out` (every element is written).

    Args:
        payloads: uint8 [P, nbytes] or [P, R, nbytes], 16-byte aligned.
        out: float32, bfloat16 or float16 [numel], written.
        capacity: as given to mask_pack.
        value_dtype: as given to mask_pack.
        scale: 1 / P for a mean. Rounded to float32 once.
        out_scale: float32, one element, or None.

    Returns:
        status int32 [P]: 0, or the sum of 1 (header wrong: all of it ignored), 2 (block starts not
        ascending or past the count) and 4 (positions not ascending or outside their block).

    Raises:
        ValueError, TypeError: an argument breaks its rule.

    Source: DCT (arXiv 2010.08899), data-parallel side; the payload is ours.

    >>> payload = torch.zeros(1, payload_layout(4, 2, torch.float32).nbytes, dtype=torch.uint8)
    >>> scatter_unpack(payload, torch.empty(4), 2, torch.float32)  # zeros are no header
    tensor([1], dtype=torch.int32)
    """
    status: Tensor = _ops.scatter_unpack(payloads, out, capacity, value_dtype, scale, out_scale)
    return status


def quantize_pack(
    residual: Tensor | None,
    grad: Tensor,
    payload: Tensor,
    format: str,
    inv_scale: Tensor | None = None,
) -> None:
    """Error feedback and every entry in few bits, in one pass over memory.

    acc = residual + grad * inv_scale, or grad * inv_scale without a residual. Every entry goes into
    the payload, and the residual becomes acc - value: value + residual == acc exactly, except that
    "ternary" rounds the residual once. Mutates `residual` and `payload`.

    Formats, with bits an entry: "float32" 32 (nothing is left), "bfloat16" 16 (nearest even; a
    finite acc that would round to infinity saturates), and by codes with a bfloat16 scale for every
    64 entries "int8" 8.25, "int4" 4.25 and "ternary" 1.875, each 64 as a row of `row_quantize`.

    NaN and Inf are sent in "float32" and "bfloat16", else all 64 become NaN. The
    residual keeps its old values there (0 where that is not finite), and the header says
    "non-finite".

    Args:
        residual: float32 [numel], read and written, or None: no error feedback.
        grad: float32, bfloat16 or float16 [numel].
        payload: uint8 [nbytes] or [R, nbytes], 16-byte aligned, nbytes from
            `quantized_payload_bytes` or a larger multiple of 16. Bytes past the last row are kept.
        format: one of the above.
        inv_scale: float32, one element, or None.

    Raises:
        ValueError, TypeError: an argument breaks its rule.

    Source: error feedback after 1-bit SGD (Interspeech 2014) and EF-SGD (arXiv 1901.09847); the
    formats are ours.

    >>> residual, payload = torch.zeros(2), torch.empty(608, dtype=torch.uint8)
    >>> quantize_pack(residual, torch.tensor([7.0, 2.25]), payload, "int4")
    >>> residual
    tensor([0.0000, 0.2500])
    """
    _ops.quantize_pack(residual, grad, payload, format, inv_scale)


def dequantize_sum(
    payloads: Tensor,
    out: Tensor,
    format: str,
    scale: float = 1.0,
    out_scale: Tensor | None = None,
) -> Tensor:
    """Sum P ranks' payloads of every entry, in rank order: every rank computes the same bits.

    out[i] = factor * sum: the sum in float32 over ranks in order from +0.0, factor =
    float32(scale) * out_scale, rounded once to out's dtype. Payloads are not trusted: one with a
    bad header adds nothing; any other bytes give some number, NaN or infinity. Mutates `out` (every
    element is written).

    Args:
        payloads: uint8 [P, nbytes] or [P, R, nbytes], 16-byte aligned.
        out: float32, bfloat16 or float16 [numel], written.
        format: as given to `quantize_pack`.
        scale: 1 / P for a mean. Rounded to float32 once.
        out_scale: float32, one element, or None.

    Returns:
        status int32 [P]: 0, or 1 if the header (of a range) is wrong.

    Raises:
        ValueError, TypeError: an argument breaks its rule.

    Source: that of `quantize_pack`.

    >>> payload = torch.zeros(1, quantized_payload_bytes(4, "int8"), dtype=torch.uint8)
    >>> dequantize_sum(payload, torch.empty(4), "int8")  # zeros are no header
    tensor([1], dtype=torch.int32)
    """
    status: Tensor = _ops.dequantize_sum(payloads, out, format, scale, out_scale)
    return status


def dequantize_sum_pack(
    payloads: Tensor, residual: Tensor, payload: Tensor, format: str, scale: float = 1.0
) -> Tensor:
    """Sum P ranks' payloads and pack the sum again: the owner's part of a reduce-scatter.

    `dequantize_sum` and then `quantize_pack` of what it wrote, bit for bit, without the float32 sum
    in memory. Mutates `residual` and `payload`.

    Args:
        payloads: uint8 [P, nbytes], 16-byte aligned.
        residual: float32 [numel], the owner's, in units of the sum times `scale`.
        payload: uint8 [nbytes], 16-byte aligned.
        format: of all payloads, as given to `quantize_pack`.
        scale: 1 / P for a mean. Rounded to float32 once.

    Returns:
        status int32 [P], as of `dequantize_sum`.

    Raises:
        ValueError, TypeError: an argument breaks its rule.

    Source: that of `quantize_pack`.

    >>> payloads = torch.zeros(1, quantized_payload_bytes(4, "int8"), dtype=torch.uint8)
    >>> dequantize_sum_pack(payloads, torch.zeros(4), torch.empty_like(payloads[0]), "int8")
    tensor([1], dtype=torch.int32)
    """
    status: Tensor = _ops.dequantize_sum_pack(payloads, residual, payload, format, scale)
    return status


def row_pack(x: Tensor, k: int, value_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The k entries of largest magnitude of every row, with their positions. Differentiable in x.

    Exactly k per row, in column order (ties: the lower column; NaN ranks as infinity). The gradient
    is `row_unpack` at the same positions.

    Args:
        x: float32, bfloat16 or float16 [B, d].
        k: entries kept per row, 1 to d.
        value_dtype: float32, bfloat16 or float16; values are rounded as `.to(value_dtype)` does.

    Returns:
        values [B, k] of value_dtype, and positions uint8 [B, w]: the smallest of a bitmap
        (ceil(d / 8) bytes, least significant bit first), uint8 columns (d <= 256) and little-endian
        uint16 columns (d <= 65,536), the first of these on a tie, by (d, k) alone.

    Raises:
        ValueError, TypeError: an argument breaks its rule.

    Source: DCT (arXiv 2010.08899), model-parallel side; exact top-k per row is our reconstruction.

    >>> row_pack(torch.tensor([[0.0, -2.0, 1.0, 3.0]]), 2, torch.float32)
    (tensor([[-2.,  3.]]), tensor([[10]], dtype=torch.uint8))
    """
    packed: tuple[Tensor, Tensor] = _ops.row_pack(x, k, value_dtype)
    return packed


def row_gather(x: Tensor, positions: Tensor, k: int, value_dtype: torch.dtype) -> Tensor:
    """The entries of x at the positions of an earlier `row_pack`: a backward pass's message.

    Positions are not trusted: a column that is not above every column accepted before it in its
    row, or is >= d, gathers 0; bits past the k-th are ignored. The gradient is `row_unpack` at the
    same positions.

    Args:
        x: float32, bfloat16 or float16 [B, d].
        positions: uint8 [B, w] for this d and k.
        k: entries per row, 1 to d.
        value_dtype: float32, bfloat16 or float16.

    Returns:
        [B, k] of value_dtype.

    Raises:
        ValueError, TypeError: an argument breaks its rule.

    Source: DCT (arXiv 2010.08899), model-parallel side: one mask for both directions.

    >>> row_gather(torch.tensor([[0.0, 5.0, 6.0, 7.0]]), torch.tensor([[10]], dtype=torch.uint8), 2,
    ...            torch.float32)
    tensor([[5., 7.]])
    """
    values: Tensor = _ops.row_gather(x, positions, k, value_dtype)
    return values


def row_unpack(values: Tensor, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Put packed rows back in place, zeros elsewhere. Differentiable in values.

    Positions are not trusted, as in `row_gather`: a column that cannot be accepted scatters
    nothing. The gradient is `row_gather` at the same positions.

    Args:
        values: float32, bfloat16 or float16 [B, k].
        positions: uint8 [B, w] for this width and k.
        width: d, at least k.
        dtype: of the result, float32, bfloat16 or float16.

    Returns:
        [B, width] of dtype.

    Raises:
        ValueError, TypeError: an argument breaks its rule.

    Source: DCT (arXiv 2010.08899), model-parallel side.

    >>> row_unpack(torch.tensor([[5.0, 7.0]]), torch.tensor([[10]], dtype=torch.uint8), 4,
    ...            torch.float32)
    tensor([[0., 5., 0., 7.]])
    """
    dense: Tensor = _ops.row_unpack(values, positions, width, dtype)
    return dense


def row_quantize(x: Tensor, format: str) -> Tensor:
    """Every entry of every row in a few bits, with a scale per row. Not differentiable.

    Formats, with bytes per row (docs/reference/ops.md has every bit):

    - "int8", d + 2, and "int4", ceil(d / 2) + 2: 127 (or 7) steps up to the largest magnitude.
    - "ternary", ceil(d / 5) + 2: -1, 0 or 1 times the mean of the magnitudes above .75 of the mean
      of all; the others are 0.
    - "sign", ceil(d / 8) + 2: -1 or 1 times the mean of all magnitudes.

    A row with a NaN or an infinity dequantizes to NaN everywhere. A scale below 2**-126 is 0: such
    a row becomes zeros.

    Args:
        x: float32, bfloat16 or float16 [B, d], d in 1 to 2**31 - 1.
        format: one of the above.

    Returns:
        uint8 [B, w], w = dct_kernels.row_layout.row_bytes(d, format).

    Raises:
        ValueError, TypeError: an argument breaks its rule.

    Source: row-wise quantized exchange is FBGEMM's; ternary after TWN (arXiv 1605.04711), sign
    after signSGD with a scale (arXiv 1901.09847); a bfloat16 scale and the order-free sums are our
    reconstruction.

    >>> row_quantize(torch.tensor([[0.0, -2.0, 1.0, 7.0]]), "int4")
    tensor([[224, 113, 128,  63]], dtype=torch.uint8)
    """
    rows: Tensor = _ops.row_quantize(x, format)
    return rows


def row_dequantize(rows: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    """The rows that `row_quantize` made: code times scale, rounded once. Not differentiable.

    Rows are not trusted: any bytes give some number, NaN or infinity (docs/reference/ops.md).

    Args:
        rows: uint8 [B, w] for this width and format, at any address.
        width: d, 1 to 2**31 - 1.
        format: as given to `row_quantize`.
        dtype: of the result, float32, bfloat16 or float16; rounded as `.to(dtype)` does, so
            float16 overflows to infinity.

    Returns:
        [B, width] of dtype.

    Raises:
        ValueError, TypeError: an argument breaks its rule.

    Source: that of `row_quantize`.

    >>> row_dequantize(torch.tensor([[224, 113, 128, 63]], dtype=torch.uint8), 4, "int4",
    ...                torch.float32)
    tensor([[ 0., -2.,  1.,  7.]])
    """
    dense: Tensor = _ops.row_dequantize(rows, width, format, dtype)
    return dense
