"""Values that expose kernel bugs: NaNs, zeros, rounding ties, the limits of each format."""

import numpy as np
import torch

from conformance import bits

# Numbers of elements around 32 and around multiples of the block size, 16,384.
SIZES = (0, 1, 31, 32, 33, 16383, 16384, 16385, 3 * 16384 + 7)
LARGE = 10**6 + 3

NAN_BITS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF812345, 0x7FFFFFFF, 0xFFFFFFFF)
INFINITY_BITS = (0x7F800000, 0xFF800000)
FINITE_BITS = (
    *(0x00000000, 0x80000000),  # both zeros
    *(0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00008001, 0x007FFFFF),  # subnormals
    *(0x00800000, 0x80800000, 0x00800001),  # the smallest normal numbers
    *(0x3F800000, 0xBF800000, 0x3F800001, 0x3F7FFFFF),  # around one
    *(0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F817FFF, 0x3F818000, 0x3F818001),  # bfloat16 ties
    *(0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0xFF7F8000, 0x7F7F8001, 0x7F7FFFFF, 0xFF7FFFFF),  # max
    *(0x477FE000, 0x477FEFFF, 0x477FF000, 0xC77FF000, 0x47800000),  # the maximum of float16
    *(0x33800000, 0x33000000, 0x33000001, 0x33C00000, 0x387FC000, 0x387FE000),  # its subnormals
)


def hard(numel, dtype=torch.float32, seed=0, non_finite=True):
    """[numel]: half are multiples of 1/8, half are special (float32) or arbitrary (16 bits)."""
    rng = np.random.default_rng([seed, numel])
    if dtype == torch.float32:
        pool = np.array(FINITE_BITS + (NAN_BITS + INFINITY_BITS if non_finite else ()), np.uint32)
    else:
        pool = np.arange(2**16, dtype=np.uint16)
        if not non_finite:
            pool = pool[np.isfinite(bits.numbers(bits.from_raw(pool, dtype)))]
    tame = torch.from_numpy(np.round(rng.standard_normal(numel) * 8) / 8).to(dtype)
    picked = np.where(rng.random(numel) < 0.5, rng.choice(pool, numel), bits.raw(tame))
    return bits.from_raw(picked, dtype)


def normal(numel, dtype=torch.float32, seed=0):
    rng = np.random.default_rng([seed, numel])
    return torch.from_numpy(rng.standard_normal(numel)).to(dtype)


def patterns(numel):
    """[numel] finite float32 values with random bits, and so with random exponents."""
    rng = np.random.default_rng([0, numel])
    random = rng.integers(0, 2**32, numel, dtype=np.uint32)
    exponent_all_ones = (random & 0x7F800000) == 0x7F800000
    return bits.from_raw(np.where(exponent_all_ones, random & 0xBFFFFFFF, random), torch.float32)
