"""sample_threshold, with the published strata."""

import math

import numpy as np

from . import floats, payload

MASK = 0xFFFFFFFF


def hash32(seed, r, j):
    x = (seed * 0x9E3779B1 & MASK) ^ (r * 0x85EBCA77 & MASK) ^ (j * 0xC2B2AE3D & MASK)
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def picks(n, m, seed, r):
    """One index in each of m strata of [0, n)."""
    found = []
    for j in range(m):
        start, end = j * n // m, (j + 1) * n // m
        found.append(start + (hash32(seed % 2**32, r, j) * (end - start) >> 32))
    return found


def rank(density, n):
    """The k of the k-th largest: density * n in float64, rounded up."""
    return min(max(math.ceil(density * n), 1), n)


def sample_threshold(grad, residual, density, ranges=1, max_samples=65536, seed=0, inv_scale=None):
    """Return float32 [ranges]; `grad` and `residual` are float32 arrays."""
    acc = floats.accumulate(residual, grad, inv_scale)
    result = []
    for r in range(ranges):
        low, high = payload.bounds(len(acc), ranges, r)
        n = high - low
        if n == 0:
            result.append(math.inf)
            continue
        chosen = range(n) if n <= max_samples else picks(n, max_samples, seed, r)
        magnitudes = np.abs(acc[low + np.array(chosen)])
        magnitudes[np.isnan(magnitudes)] = np.inf
        result.append(np.sort(magnitudes)[-rank(density, len(chosen))])
    return np.array(result, np.float32)
