"""Random numbers that are functions of a counter, so they do not depend on chunks or ranks."""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW_HALF = np.uint64(0xFFFFFFFF)


def bits(seed: int, stream: int, counters: np.ndarray) -> np.ndarray:
    """64 random bits for each counter, from splitmix64's finalizer.

    Args:
        seed, stream: integers >= 0; each pair gives independent numbers.
        counters: integers >= 0, any shape.

    Returns:
        uint64, shape of `counters`.
    """
    key = _mix(_mix(np.array([seed], np.uint64) + _GOLDEN) + np.array([stream], np.uint64))
    return _mix(key + counters.astype(np.uint64) * _GOLDEN)


def uniform(seed: int, stream: int, counters: np.ndarray) -> np.ndarray:
    """Uniform random numbers in the open interval (0, 1): float64, shape of `counters`."""
    return ((bits(seed, stream, counters) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def normal(seed: int, stream: int, counters: np.ndarray) -> np.ndarray:
    """Normal random numbers (Box-Muller on both halves of `bits`): float64, shape of `counters`."""
    drawn = bits(seed, stream, counters)
    radius = np.sqrt(-2 * np.log(((drawn >> np.uint64(32)) + 0.5) * 2.0**-32))
    return radius * np.cos(2 * np.pi * (drawn & _LOW_HALF) * 2.0**-32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
