"""mask_pack: error feedback, mask, compaction."""

import numpy as np

from . import floats, payload


def mask_pack(residual, grad, threshold, rows, geometry, inv_scale=None):
    """Return the new residual and `seen`; write payloads into `rows`, one bytearray per range.

    `residual`, `grad` and `threshold` (one per range) are float32 arrays.
    """
    acc = floats.accumulate(residual, grad, inv_scale)
    finite = np.isfinite(acc)
    new = np.where(finite, acc, np.where(np.isfinite(residual), residual, np.float32(0)))
    values = floats.narrow(acc, geometry.dtype, saturate=True)
    seen = np.zeros(len(rows), np.int32)
    for r, row in enumerate(rows):
        low, high = geometry.bounds(r)
        part = acc[low:high]
        passed = np.flatnonzero(~(np.abs(part) < threshold[r]) & (part != 0))
        seen[r] = min(len(passed), 2**31 - 1)
        packed = passed[: geometry.capacity]
        flags = payload.OVERFLOW if len(passed) > geometry.capacity else 0
        flags |= 0 if finite[low:high].all() else payload.NON_FINITE
        content = payload.content(geometry, r, packed, values[low + packed], flags)
        payload.write(row, geometry, content)
        kept = low + packed[finite[low + packed]]
        new[kept] = acc[kept] - floats.widen(values[kept], geometry.dtype)
    return new, seen
