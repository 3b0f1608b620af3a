"""scatter_unpack: validation of untrusted payloads, and the sum in rank order."""

import itertools

import numpy as np

from . import e3m0, floats, payload


def scatter_unpack(payloads, out, geometry, out_dtype, scale=1.0, accumulate=False, out_scale=None):
    """Raw bits of the new `out` and the status of every rank.

    `payloads[p][r]` are bytes, `out` the old content as float32 numbers.
    """
    total = np.zeros(geometry.numel, np.float32)
    status = np.zeros(len(payloads), np.int32)
    with np.errstate(all="ignore"):
        for p, rows in enumerate(payloads):
            for r, row in enumerate(rows):
                low, high = geometry.bounds(r)
                status[p] |= _add(total[low:high], payload.read(row, geometry, r), geometry)
        factor = np.float32(scale)
        if out_scale is not None:
            factor = factor * np.float32(out_scale)
        base = out if accumulate else np.zeros_like(total)
        return floats.narrow(base + factor * total, out_dtype), status


def _add(total, content, geometry):
    """Add the sound blocks of one rank's payload of one range to `total`; its status."""
    numel, count = len(total), content.count
    coded = geometry.dtype == "e3m0"
    exponent = content.reserved[0]  # of e3m0's scale
    if (
        content.magic != payload.MAGIC
        or content.version != (2 if coded else 1)
        or content.dtype_code != payload.CODES[geometry.dtype]
        or content.flags not in range(8)
        or content.numel != numel
        or content.capacity != geometry.capacity
        or count > min(content.capacity, numel)
        or content.reserved[1:] != bytes(39)
        or exponent not in (range(1, 248) if coded else [0])
    ):
        return 1
    if coded:
        values = e3m0.decode(content.values, content.scale)
    else:
        values = floats.widen(np.array(content.values), geometry.dtype)
    status, blocks = 0, len(content.starts) - 1
    if blocks == 0 and content.starts[0] != 0:
        return 2
    size = payload.SUB_BLOCK if coded else payload.BLOCK
    for b in range(blocks):
        first, end = content.starts[b], content.starts[b + 1]
        inner = [first + s for s in content.sub_starts[3 * b : 3 * b + 3]]
        edges = [first, *inner, end]
        if (
            edges != sorted(edges)
            or end > count
            or (b == 0 and first != 0)
            or (b == blocks - 1 and end != count)
        ):
            status |= 2
            continue
        found = []
        for q, (low, high) in enumerate(itertools.pairwise(edges)):
            begin = b * payload.BLOCK + q * size
            positions = content.positions[low:high]
            ascending = all(a < b for a, b in itertools.pairwise(positions))
            if not ascending or any(p >= min(size, numel - begin) for p in positions):
                status |= 4
                break
            found += [begin + p for p in positions]
        else:
            for index, value in zip(found, values[first:end], strict=True):
                total[index] += value
    lost = payload.NON_FINITE if coded else payload.OVERFLOW | payload.NON_FINITE
    if content.flags & lost == lost and numel > 0:
        total[0] += np.float32(np.nan)
    return status
