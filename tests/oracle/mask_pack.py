"""mask_pack: error feedback, mask, compaction."""

import numpy as np

from . import e3m0, floats, payload


def mask_pack(
    residual, grad, segments, threshold, rows, geometry, inv_scale=None, status=(), scale=()
):
    """New residual and seen; `rows`, one bytearray a range, are written in place.

    `residual`, `grad` (or None), `threshold` are float32 arrays, `segments` a list of S + 1,
    `status` a list of any length, `scale` one of a float a range for e3m0.
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
    if geometry.dtype != "e3m0":
        values = floats.narrow(acc, geometry.dtype, saturate=True)
        sent, powers = floats.widen(values, geometry.dtype), [1.0] * len(rows)
    else:
        powers = e3m0.nearest_scale(scale)
        each = np.ones(geometry.numel)
        for r, power in enumerate(powers):
            each[slice(*geometry.bounds(r))] = power
        passed &= e3m0.holds(acc, each)
        values = e3m0.encode(acc, each)
        sent = e3m0.decode(values, each)
    for r, row in enumerate(rows):
        low, high = geometry.bounds(r)
        through = low + np.flatnonzero(passed[low:high])
        packed = through[: geometry.capacity]
        flags = payload.OVERFLOW if len(through) > geometry.capacity else 0
        if (active & ~finite)[low:high].any():
            flags |= payload.NON_FINITE
        if any(status):
            flags |= payload.DAMAGE
        content = payload.content(geometry, r, packed - low, values[packed], flags, powers[r])
        payload.write(row, geometry, content)
        kept = packed[finite[packed]]
        new[kept] = acc[kept] - sent[kept]
    return new, seen
