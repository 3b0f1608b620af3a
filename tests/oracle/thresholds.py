"""sample_threshold."""

import math

import numpy as np

from . import floats

MASK = 0xFFFFFFFF


def hash32(seed, s, j):
    x = (seed * 0x9E3779B1 & MASK) ^ (s * 0x85EBCA77 & MASK) ^ (j * 0xC2B2AE3D & MASK)
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def picks(n, m, seed, s):
    """One index in each of m strata of [0, n)."""
    found = []
    for j in range(m):
        start, end = j * n // m, (j + 1) * n // m
        found.append(start + (hash32(seed % 2**32, s, j) * (end - start) >> 32))
    return found


def rank(density, n):
    """k of "the k-th largest", from a float64 product."""
    return min(max(math.ceil(density * n), 1), n)


def sample_threshold(x, residual, segments, density, max_samples=65536, seed=0, inv_scale=None):
    """float32 [S]; x and residual (or None) are float32 arrays, segments a list."""
    acc = floats.accumulate(residual, x, inv_scale)
    result = []
    for s in range(len(segments) - 1):
        low, n = segments[s], segments[s + 1] - segments[s]
        if n == 0:
            result.append(math.inf)
            continue
        chosen = range(n) if n <= max_samples else picks(n, max_samples, seed, s)
        magnitudes = np.abs(acc[low + np.array(chosen)])
        magnitudes[np.isnan(magnitudes)] = np.inf
        result.append(np.sort(magnitudes)[-rank(density, len(chosen))])
    return np.array(result, np.float32)
