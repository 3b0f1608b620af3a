"""Payload version 2, for the kernels: its values, a power of two in four bits, and its sub-blocks.

A scale is an int32, `biased`: its exponent as float32 stores it. Code and remainder add up to acc,
bit for bit; csrc/common/e3m0.h has the proof.
"""

import triton
import triton.language as tl

from .. import layout

_HEADER_BYTES = tl.constexpr(layout.HEADER_BYTES)
_SUB_BLOCK = tl.constexpr(layout.SUB_BLOCK)
_SUB_BLOCKS = tl.constexpr(layout.BLOCK // layout.SUB_BLOCK)
_LEAST = tl.constexpr(layout.LEAST_SCALE)
_MOST = tl.constexpr(layout.MOST_SCALE)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # a float32 but for its sign
_HALF = tl.constexpr(1 << 22)  # of its mantissa: from 1.5 times a power of two the next is nearest


@triton.jit
def _nearest_power(x):
    # In uint32: a NaN's bits would carry into the sign.
    return ((x.to(tl.uint32, bitcast=True) & _MAGNITUDE) + _HALF >> 23).to(tl.int32)


@triton.jit
def clamp_scale(biased):
    """The scale, clamped to those that a header may have."""
    return tl.minimum(tl.maximum(biased, _LEAST), _MOST)


@triton.jit
def load_scale(scale, range_index):
    """The power of two nearest to a range's scale, any float; the larger one on a tie."""
    return clamp_scale(_nearest_power(tl.load(scale + range_index)))


@triton.jit
def holds(acc, biased):
    """Whether an entry can be sent: half the scale or more, and below 2**24 x the largest code."""
    magnitude = acc.to(tl.int32, bitcast=True) & _MAGNITUDE
    half_the_scale = tl.where(biased == 1, _HALF, (biased - 1) << 23)
    span = (tl.minimum(biased + 31, 255) << 23) - half_the_scale
    # Magnitudes below half the scale wrap around.
    return (magnitude - half_the_scale).to(tl.uint32, bitcast=True) < span.to(tl.uint32)


@triton.jit
def encode(acc, biased):
    """The nearest code, the larger one on a tie: negative << 3 | exponent, int32."""
    exponent = tl.minimum(tl.maximum(_nearest_power(acc) - biased, 0), 7)
    return (acc.to(tl.int32, bitcast=True) >> 28 & 8) | exponent


@triton.jit
def decode(code, biased):
    """The float32 of a code, the low four bits."""
    bits = ((code & 7) + biased) << 23 | (code & 8) << 28
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _sub_starts(message, range_blocks, block):
    """Pointer to the starts of a block's second, third and fourth sub-block."""
    starts = (message + _HEADER_BYTES).to(tl.pointer_type(tl.uint32))
    sub_starts = (starts + range_blocks + 1).to(tl.pointer_type(tl.uint16))
    return sub_starts + block * (_SUB_BLOCKS - 1)


@triton.jit
def store_sub_starts(message, range_blocks, start, tile, tiles, CHUNK: tl.constexpr):
    """Store the starts of a chunk of tiles, which are sub-blocks: `start` is uint32 [CHUNK], the
    first entries of `tile` and those after it. Tiles past the last begin at its end.
    """
    block = (tile // _SUB_BLOCKS + tl.arange(0, CHUNK // _SUB_BLOCKS))[:, None]
    sub_block = tl.arange(0, _SUB_BLOCKS)[None, :]
    start = tl.reshape(start, [CHUNK // _SUB_BLOCKS, _SUB_BLOCKS])
    of_block = tl.sum(tl.where(sub_block == 0, start, 0), 1)[:, None]
    inside = (block * _SUB_BLOCKS < tiles) & (sub_block > 0)
    to = _sub_starts(message, range_blocks, block) + sub_block - 1
    tl.store(to, (start - of_block).to(tl.uint16), mask=inside)


@triton.jit
def load_sub_starts(message, range_blocks, block, block_length, entries):
    """The starts in a block of so many entries, as `position_in_block` takes them, and whether they
    are sound. An empty range has none.
    """
    at = _sub_starts(message, range_blocks, block)
    second = tl.load(at, mask=block_length > 0, other=0).to(tl.int64)
    third = tl.load(at + 1, mask=block_length > 0, other=0).to(tl.int64)
    fourth = tl.load(at + 2, mask=block_length > 0, other=0).to(tl.int64)
    sound = (second <= third) & (third <= fourth) & (fourth <= entries)
    return second << 17 | third << 32 | fourth << 47, sound  # each at most 2**14


@triton.jit
def position_in_block(word, entry, sub_starts):
    """The position of an entry, by its index in its block: 12 bits are in its word."""
    second = (sub_starts >> 17 & 0x7FFF).to(tl.int32)
    third = (sub_starts >> 32 & 0x7FFF).to(tl.int32)
    fourth = (sub_starts >> 47 & 0x7FFF).to(tl.int32)
    later = tl.where(entry >= fourth, 3 * _SUB_BLOCK, 2 * _SUB_BLOCK)
    sub_block = tl.where(entry >= third, later, tl.where(entry >= second, _SUB_BLOCK, 0))
    return sub_block | word >> 4
