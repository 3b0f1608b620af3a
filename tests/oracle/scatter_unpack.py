"""scatter_unpack: validation of untrusted payloads, and the sum in rank order."""

import itertools

import numpy as np

from . import floats, payload


def scatter_unpack(payloads, geometry, out_dtype, scale=1.0, out_scale=None):
    """Return the raw bits of `out` and the status of every rank; `payloads[p][r]` are bytes."""
    total = np.zeros(geometry.numel, np.float32)
    status = np.zeros(len(payloads), np.int32)
    with np.errstate(all="ignore"):
        for p, rows in enumerate(payloads):
            for r, row in enumerate(rows):
                low, high = geometry.bounds(r)
                status[p] |= _add(total[low:high], payload.read(row, geometry, r), geometry)
        out = np.float32(0) + floats.factor(scale, out_scale) * total  # -0.0 becomes 0.0
        return floats.narrow(out, out_dtype), status


def _add(total, content, geometry):
    """Add the valid blocks of one range of a payload to `total`; return its status."""
    numel, count = len(total), content.count
    if (
        content.magic != payload.MAGIC
        or content.version != 1
        or content.dtype_code != payload.CODES[geometry.dtype]
        or content.flags not in range(4)
        or content.numel != numel
        or content.capacity != geometry.capacity
        or count > min(content.capacity, numel)
        or content.reserved != bytes(40)
    ):
        return 1
    values = floats.widen(np.array(content.values), geometry.dtype)
    status, blocks = 0, len(content.starts) - 1
    if blocks == 0 and content.starts[0] != 0:
        return 2
    for b in range(blocks):
        first, end = content.starts[b], content.starts[b + 1]
        if (
            first > end
            or end > count
            or (b == 0 and first != 0)
            or (b == blocks - 1 and end != count)
        ):
            status |= 2
            continue
        positions = content.positions[first:end]
        length = min(payload.BLOCK, numel - b * payload.BLOCK)
        ascending = all(a < b for a, b in itertools.pairwise(positions))
        if not ascending or any(position >= length for position in positions):
            status |= 4
            continue
        for position, value in zip(positions, values[first:end], strict=True):
            total[b * payload.BLOCK + position] += value
    if content.flags & payload.OVERFLOW and content.flags & payload.NON_FINITE and numel > 0:
        total[0] += np.float32(np.nan)
    return status
