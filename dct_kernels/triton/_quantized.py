"""Device functions for a tile of entries, shared by the ops on dense payloads.

A tile is [GROUPS, 64]. The 64 entries of a group share a scale. Codes are read and written as
32-bit words, except ternary codes, because 64 of them take 13 bytes.
"""

import triton
import triton.language as tl
from torch import Tensor

from .. import layout
from ._codes import ROUND_TO_INTEGER, scale_bits, ternary_code, units
from ._launch import INTERPRETED
from ._numeric import FLOAT32_INFINITY, FLOAT32_NAN, is_finite, round_saturating, to_float

# Elements of a tile, a multiple of the row size. The interpreter's time depends on the number of
# programs, not on their size.
TILE = layout.BLOCK if INTERPRETED else 4096
SUM_WARPS = 8  # 16 elements per thread, for wide loads of codes
PACK_WARPS = 16  # 8 elements per thread; 16 would take too many registers

ROW = tl.constexpr(layout.ROW)
SCALED = tl.constexpr(layout.SCALED)
SCALES = tl.constexpr(layout.ROW // layout.SCALED)  # per row
GROUPS = tl.constexpr(TILE // layout.SCALED)
TERNARY_BYTES = tl.constexpr(layout.CODE_BYTES["ternary"])


def range_sizes(tensor: Tensor, ranges: int) -> tuple[int, int, int]:
    """Return the elements of a unit, and the units and tiles of a full range.

    A range consists of whole units. Units of 16 elements let the compiler use wide accesses.
    """
    length = layout.range_length(tensor, ranges)
    unit = 16 if length % 16 == 0 else 1
    return unit, length // unit, triton.cdiv(min(length, tensor.numel()), TILE)


def header_kind(format: str) -> int:
    """The first 8 bytes of a header as a number: magic, version and format, without flags."""
    code = layout.QUANTIZED_CODES[format]
    return layout.MAGIC | layout.QUANTIZED_VERSION << 32 | code << 48


@triton.jit
def header_entries(length):
    """The number that a header stores as capacity and again as count, for `length` elements."""
    return tl.minimum(length, 0xFFFFFFFF)


@triton.jit
def elements():
    """[GROUPS, 64]: the index of each element in the tile."""
    return tl.arange(0, GROUPS)[:, None] * SCALED + tl.arange(0, SCALED)[None, :]


@triton.jit
def _present(length):
    """[GROUPS, 1]: whether the group's row contains any of the first `length` elements."""
    return tl.arange(0, GROUPS)[:, None] // SCALES * ROW < length


@triton.jit
def _codes_at(rows, CODE_BYTES: tl.constexpr, ROW_BYTES: tl.constexpr):
    """[GROUPS, 1]: the addresses of the codes. The rows of the tile begin at `rows`."""
    group = tl.arange(0, GROUPS)[:, None]
    return rows + (group // SCALES * ROW_BYTES + group % SCALES * CODE_BYTES)


@triton.jit
def _scales_at(rows, ROW_BYTES: tl.constexpr):
    at = _codes_at(rows + (ROW_BYTES - 2 * SCALES), 2, ROW_BYTES)
    return at.to(tl.pointer_type(tl.int16))


@triton.jit
def _words_at(rows, WORDS: tl.constexpr, ROW_BYTES: tl.constexpr):
    """[GROUPS, WORDS]: the addresses of the words of codes."""
    at = _codes_at(rows, 4 * WORDS, ROW_BYTES).to(tl.pointer_type(tl.int32))
    return at + tl.arange(0, WORDS)[None, :]


@triton.jit
def _quantize(acc, FORMAT: tl.constexpr):
    """Return codes in the low bits of int32, their values, the bits of the scales [GROUPS, 1], and
    whether each group is sent. A group with NaN or Inf is not sent: its codes are 0, its scale NaN.
    """
    bits = acc.to(tl.int32, bitcast=True)
    top = tl.max(bits & 0x7FFFFFFF, 1)[:, None]
    sent = top < FLOAT32_INFINITY
    top = tl.where(sent, top, 0)
    if FORMAT == "ternary":
        in_one, unit = units(top)
        acc = tl.where(sent, acc, 0.0) * in_one
        magnitude = tl.abs(acc)
        # The sum of 64 numbers of 22 bits fits in 32 bits. Multiplying by 1 / 64 is exact.
        mean = tl.sum(magnitude.to(tl.int32), 1)[:, None].to(tl.float32) * (1 / SCALED)
        bound = 0.75 * mean
        keep = magnitude > bound
        total = tl.sum(tl.where(keep, magnitude, 0.0).to(tl.int32), 1)[:, None]
        kept = tl.maximum(tl.sum(keep.to(tl.int32), 1)[:, None], 1)
        exact = tl.div_rn(total.to(tl.float32), kept.to(tl.float32)) * unit
    else:
        levels = tl.full([GROUPS, 1], 127.0 if FORMAT == "int8" else 7.0, tl.float32)
        exact = tl.div_rn(top.to(tl.float32, bitcast=True), levels)
    scale = scale_bits(exact)
    factor = (scale << 16).to(tl.float32, bitcast=True)
    if FORMAT == "ternary":
        codes = (acc > bound).to(tl.int32) - (acc < -bound).to(tl.int32)
        codes = tl.where(scale != 0, codes, 0)
        value = codes.to(tl.float32) * factor
    else:
        usable = sent & (scale != 0)
        inverse = tl.div_rn(tl.full([GROUPS, 1], 1.0, tl.float32), tl.where(usable, factor, 1.0))
        rounded = tl.where(usable, acc, 0.0) * inverse + ROUND_TO_INTEGER
        codes = rounded.to(tl.int32, bitcast=True)
        value = (rounded - ROUND_TO_INTEGER) * factor
    return codes, value, tl.where(sent, scale, FLOAT32_NAN >> 16), sent


@triton.jit
def _store_codes(rows, codes, length, FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr):
    if FORMAT == "ternary":
        # Collect the positive and the negative codes as bits of two numbers. Each byte of the
        # message is computed from five bits of both numbers.
        bit = tl.full([1, SCALED], 1, tl.uint64) << tl.arange(0, SCALED)[None, :].to(tl.uint64)
        positive = tl.sum(tl.where(codes > 0, bit, 0), 1)[:, None]
        negative = tl.sum(tl.where(codes < 0, bit, 0), 1)[:, None]
        byte = tl.arange(0, 16)[None, :]
        first = tl.minimum(5 * byte, 60).to(tl.uint64)
        positive = (positive >> first & 31).to(tl.int32)
        negative = (negative >> first & 31).to(tl.int32)
        packed = tl.zeros([GROUPS, 16], tl.int32)
        for digit in tl.static_range(5):
            packed += ((positive >> digit & 1) - (negative >> digit & 1)) * 3**digit
        target = _codes_at(rows, TERNARY_BYTES, ROW_BYTES) + byte
        inside = _present(length) & (byte < TERNARY_BYTES)
        tl.store(target, (packed & 255).to(tl.uint8), mask=inside)
    else:
        BITS: tl.constexpr = 8 if FORMAT == "int8" else 4
        WORDS: tl.constexpr = SCALED * BITS // 32
        place = tl.arange(0, SCALED)[None, :] % (32 // BITS)
        codes = (codes & ((1 << BITS) - 1)) << BITS * place
        words = tl.sum(tl.reshape(codes, [GROUPS, WORDS, 32 // BITS]), 2)
        tl.store(_words_at(rows, WORDS, ROW_BYTES), words, mask=_present(length))


@triton.jit
def pack(
    acc, old, residual, rows, length,
    FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Pack a tile into the payload at `rows`. Return which entries are sent, [GROUPS, 64] or
    [GROUPS, 1]. Unless `residual` is None, `old` is the old residual of the tile, and the new
    residual is written to `residual`."""
    element = elements()
    if not WHOLE:
        acc = tl.where(element < length, acc, 0.0)
    if FORMAT == "float32" or FORMAT == "bfloat16":
        DTYPE: tl.constexpr = tl.float32 if FORMAT == "float32" else tl.bfloat16
        rounded = round_saturating(acc, DTYPE)
        target = rows.to(tl.pointer_type(DTYPE)) + element
        tl.store(target, rounded, mask=_present(length))
        value, sent = to_float(rounded), is_finite(acc)
    else:
        codes, value, scale, sent = _quantize(acc, FORMAT)
        _store_codes(rows, codes, length, FORMAT, ROW_BYTES)
        tl.store(_scales_at(rows, ROW_BYTES), scale.to(tl.int16), mask=_present(length))
    if residual is not None:
        new = tl.where(sent, acc - value, tl.where(is_finite(old), old, 0.0))
        tl.store(residual + element, new, mask=None if WHOLE else element < length)
    return sent


@triton.jit
def _load(rows, length, FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Return the stored codes or values, and the bits of the scales [GROUPS, 1]."""
    present = _present(length)
    if FORMAT == "float32" or FORMAT == "bfloat16":
        DTYPE: tl.constexpr = tl.float32 if FORMAT == "float32" else tl.bfloat16
        codes = tl.load(rows.to(tl.pointer_type(DTYPE)) + elements(), mask=present, other=0.0)
        scale = tl.zeros([GROUPS, 1], tl.int16)  # unused
    else:
        if FORMAT == "ternary":
            byte = tl.arange(0, SCALED)[None, :] // 5
            source = _codes_at(rows, TERNARY_BYTES, ROW_BYTES) + byte
        else:
            source = _words_at(rows, SCALED // 4 if FORMAT == "int8" else SCALED // 8, ROW_BYTES)
        codes = tl.load(source, mask=present, other=0)
        scale = tl.load(_scales_at(rows, ROW_BYTES), mask=present, other=0)
    return codes, scale


@triton.jit
def _values(codes, scale, FORMAT: tl.constexpr):
    """[GROUPS, 64] in float32: the values of loaded codes."""
    factor = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if FORMAT == "float32" or FORMAT == "bfloat16":
        values = to_float(codes)
    elif FORMAT == "ternary":
        digit = tl.arange(0, SCALED)[None, :] % 5
        values = ternary_code(codes.to(tl.int32), digit).to(tl.float32) * factor
    else:
        BITS: tl.constexpr = 8 if FORMAT == "int8" else 4
        place = tl.arange(0, 32 // BITS)[None, None, :]
        # Shift each code to the top of a word and down again, to extend its sign.
        code = codes[:, :, None] << (32 - BITS - BITS * place) >> 32 - BITS
        values = tl.reshape(code, [GROUPS, SCALED]).to(tl.float32) * factor
    return values


@triton.jit
def sum_payloads(
    rows, verdicts, ranks, rank_bytes, rank_verdicts, length,
    FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """[GROUPS, 64] in float32: the sum of a tile in rank order, from +0.0.

    The rows of the first rank begin at `rows`, and its verdict (1: invalid header) is at
    `verdicts`. The rows of the next rank begin `rank_bytes` bytes later, and its verdict is
    `rank_verdicts` elements later.
    """
    total = tl.zeros([GROUPS, SCALED], tl.float32)
    rank = ranks * 0
    codes, scale = _load(rows, tl.where(ranks > 0, length, 0), FORMAT, ROW_BYTES)
    wrong = tl.load(verdicts, mask=ranks > 0, other=1)
    while rank < ranks:
        # Load the rows of the next rank while the current rows are used.
        rank += 1
        rows += rank_bytes
        verdicts += rank_verdicts
        length = tl.where(rank < ranks, length, 0)
        next_codes, next_scale = _load(rows, length, FORMAT, ROW_BYTES)
        next_wrong = tl.load(verdicts, mask=rank < ranks, other=1)
        total = tl.where(wrong == 0, total + _values(codes, scale, FORMAT), total)
        codes, scale, wrong = next_codes, next_scale, next_wrong
    return total
