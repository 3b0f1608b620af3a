"""mask_pack: error feedback, mask, compaction."""

import numpy as np

from . import floats, payload


def mask_pack(residual, grad, segments, threshold, rows, geometry, inv_scale=None, status=()):
    """New residual and seen; `rows`, one bytearray a range, are written in place.

    `residual`, `grad` (or None), `threshold` are float32 arrays, `segments` a list of S + 1,
    `status` a list of any length.
    """
    acc = floats.accumulate(residual, grad, inv_scale)
    active = np.zeros(geometry.numel, bool)
    passed = np.zeros(geometry.numel, bool)
    seen = np.zeros(len(threshold), np.int32)
    for s, tau in enumerate(threshold):
        part = slice(segments[s], segments[s + 1])
        if tau < 0:
            continue
        active[part] = True
        passed[part] = ~(np.abs(acc[part]) < tau) & (acc[part] != 0)
        seen[s] = min(np.count_nonzero(passed[part]), 2**31 - 1)

    finite = np.isfinite(acc)
    new = residual.copy()
    new[active & finite] = acc[active & finite]
    new[active & ~finite & ~np.isfinite(residual)] = 0.0
    values = floats.narrow(acc, geometry.dtype, saturate=True)
    for r, row in enumerate(rows):
        low, high = geometry.bounds(r)
        through = low + np.flatnonzero(passed[low:high])
        packed = through[: geometry.capacity]
        flags = payload.OVERFLOW if len(through) > geometry.capacity else 0
        if (active & ~finite)[low:high].any():
            flags |= payload.NON_FINITE
        if any(status):
            flags |= payload.DAMAGE
        payload.write(
            row, geometry, payload.content(geometry, r, packed - low, values[packed], flags)
        )
        kept = packed[finite[packed]]
        new[kept] = acc[kept] - floats.widen(values[kept], geometry.dtype)
    return new, seen
