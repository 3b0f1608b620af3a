"""Values of payload version 2, by distances in float64; a scale is a power of two, as a number."""

import numpy as np

POWERS = 2.0 ** np.arange(-126, 121)  # that a scale may be
CODES = 2.0 ** np.arange(8)


def nearest_scale(x):
    """Of every float its magnitude's nearest power of two, the larger one of two."""
    magnitude = np.abs(np.nan_to_num(np.asarray(x, np.float64), nan=np.inf, posinf=np.inf))
    distance = np.abs(POWERS[::-1] - np.minimum(magnitude, POWERS[-1])[..., None])
    return POWERS[::-1][distance.argmin(-1)]


def biased(scale):
    """As the header has it."""
    return int(np.log2(scale)) + 127


def holds(acc, scale):
    """Half the scale or more, and no coarser than the largest code."""
    magnitude = _magnitude(acc)
    _, exponent = np.frexp(magnitude)
    last_place = 2.0 ** (np.maximum(exponent, -125) - 24)
    return np.isfinite(acc) & (magnitude >= scale / 2) & (last_place <= scale * CODES[-1])


def encode(acc, scale):
    """negative << 3 | exponent of the nearest code, of two the larger one."""
    levels = np.broadcast_to(np.asarray(scale)[..., None], (*acc.shape, 1)) * CODES[::-1]
    exponent = 7 - np.abs(levels - _magnitude(acc)[..., None]).argmin(-1)
    return (np.signbit(acc) * 8 + exponent).astype(np.int64)


def decode(codes, scale):
    """float32 numbers."""
    codes = np.asarray(codes, np.int64)
    return (np.where(codes & 8, -1.0, 1.0) * scale * CODES[codes & 7]).astype(np.float32)


def _magnitude(acc):
    """In float64; what is not finite is no number here, but keeps its sign elsewhere."""
    return np.abs(np.where(np.isfinite(acc), acc, 1).astype(np.float64))
