"""dequantize_sum_pack: dequantize_sum, then quantize_pack, with the sum kept in registers."""

import triton
import triton.language as tl
from torch import Tensor

from .. import layout
from ._launch import launch
from ._numeric import multiply_add
from ._payload import HEADER_BYTES
from ._quantized import PACK_WARPS, ROW, TILE, elements, pack, sum_payloads
from .dequantize_sum import check, float_bits
from .quantize_pack import flag_non_finite, write_headers


@triton.jit
def _pack_tile(
    residual, total, factor, message, rows, length,
    FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    i = elements()
    old = tl.load(residual + i, mask=None if WHOLE else i < length)
    acc = multiply_add(old, total, factor)
    flag_non_finite(message, pack(acc, old, residual, rows, length, FORMAT, ROW_BYTES, WHOLE))


@triton.jit(do_not_specialize=["numel", "ranks", "nbytes_in_16", "scale_bits"])
def _sum_pack_kernel(
    payloads, verdicts, residual, payload, numel, ranks, nbytes_in_16, scale_bits,
    FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    length = tl.minimum(numel - tile * TILE, TILE).to(tl.int32)
    at = tile * (TILE // ROW * ROW_BYTES) + HEADER_BYTES
    rank_bytes = nbytes_in_16.to(tl.int64) * 16
    total = sum_payloads(payloads + at, verdicts, ranks, rank_bytes, 1, length, FORMAT, ROW_BYTES)
    factor = scale_bits.to(tl.int32).to(tl.float32, bitcast=True)
    rows = payload + at
    residual += tile * TILE
    if length == TILE:  # unmasked, so that accesses are wide
        _pack_tile(residual, total, factor, payload, rows, length, FORMAT, ROW_BYTES, True)
    else:
        _pack_tile(residual, total, factor, payload, rows, length, FORMAT, ROW_BYTES, False)


def dequantize_sum_pack(
    payloads: Tensor, residual: Tensor, payload: Tensor, format: str, scale: float = 1.0
) -> Tensor:
    numel, ranks, nbytes = residual.numel(), payloads.shape[0], payloads.shape[-1]
    verdicts, status = check(payloads, numel, format)
    write_headers(payload, numel, format)
    launch(
        _sum_pack_kernel, triton.cdiv(numel, TILE),
        payloads, verdicts, residual, payload,
        numel, ranks, nbytes // 16, float_bits(scale),
        FORMAT=format, ROW_BYTES=layout.quantized_row_bytes(format), TILE=TILE,
        device=residual.device, num_warps=PACK_WARPS,
    )  # fmt: skip
    return status
