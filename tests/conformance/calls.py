"""Run one op of one backend on guarded copies of its arguments and hold it against the oracle."""

from typing import NamedTuple

import numpy as np
import torch
from oracle import mask_pack as mask_pack_oracle
from oracle import payload as payload_bytes
from oracle import scatter_unpack as scatter_unpack_oracle

from conformance import bits
from conformance.memory import Arena

PREFILL = 0x5A  # what payloads hold before the op: bytes it must not touch keep it


class Packed(NamedTuple):
    residual: torch.Tensor
    seen: torch.Tensor
    contents: list  # of every range: oracle.payload.Content
    rows: list  # of every range: bytes
    geometry: payload_bytes.Geometry


def mask_pack(
    backend,
    residual,
    grad,
    threshold,
    segments=None,
    capacity=None,
    value_dtype=torch.float32,
    ranges=None,
    inv_scale=None,
    status=None,
    offset=0,
):
    """Run mask_pack, hold residual, seen and every byte against the oracle, return them.

    `ranges` None gives a payload [nbytes], a number R gives [R, nbytes]. `threshold` and `segments`
    may be lists; by default one segment and room for everything. `status` is a list or None.
    """
    numel = residual.numel()
    threshold = torch.as_tensor(threshold, dtype=torch.float32)
    segments = torch.as_tensor([0, numel] if segments is None else segments)
    capacity = max(numel, 1) if capacity is None else capacity
    geometry = payload_bytes.Geometry(numel, capacity, bits.name(value_dtype), ranges or 1)
    shape = (geometry.nbytes,) if ranges is None else (ranges, geometry.nbytes)

    arena = Arena(backend.device, offset)
    new = arena.written(residual)
    payload = arena.written(torch.full(shape, PREFILL, dtype=torch.uint8), offset=0)
    seen = arena.written(torch.full((len(segments) - 1,), -77, dtype=torch.int32))
    backend.mask_pack(
        new,
        arena.read(grad),
        arena.read(segments),
        arena.read(threshold),
        payload,
        seen,
        capacity,
        value_dtype,
        arena.read(inv_scale),
        None if status is None else arena.read(torch.tensor(status, dtype=torch.int32)),
    )
    arena.check()

    rows = [bytearray([PREFILL]) * geometry.nbytes for _ in range(geometry.ranges)]
    expected_residual, expected_seen = mask_pack_oracle.mask_pack(
        bits.numbers(residual),
        bits.numbers(grad),
        segments.tolist(),
        threshold.numpy(),
        rows,
        geometry,
        None if inv_scale is None else inv_scale.item(),
        status or (),
    )
    bits.assert_equal(seen.cpu().numpy(), expected_seen, "seen")
    bits.assert_floats(new, expected_residual.view(np.uint32), "residual")
    actual_rows = [row.cpu().numpy() for row in payload.view(geometry.ranges, -1)]
    for r, (actual, expected) in enumerate(zip(actual_rows, rows, strict=True)):
        bits.assert_equal(actual, np.frombuffer(expected, np.uint8), f"payload of range {r}")
    contents = [payload_bytes.read(row, geometry, r) for r, row in enumerate(rows)]
    return Packed(new.cpu(), seen.cpu(), contents, [bytes(row) for row in rows], geometry)


def scatter_unpack(
    backend,
    payloads,
    geometry,
    out=torch.float32,
    scale=1.0,
    accumulate=False,
    out_scale=None,
    three_dims=False,
    offset=0,
):
    """Run scatter_unpack, hold out and status against the oracle, return them.

    `payloads[p][r]` are bytes; `out` is the old content or just its dtype. With one range, payloads
    are [P, nbytes], or with `three_dims` [P, 1, nbytes].
    """
    if isinstance(out, torch.dtype):
        out = torch.full((geometry.numel,), torch.nan, dtype=out)
    raw = np.frombuffer(b"".join(b"".join(rows) for rows in payloads), np.uint8)
    shape = (len(payloads), geometry.ranges, geometry.nbytes)
    if geometry.ranges == 1 and not three_dims:
        shape = (len(payloads), geometry.nbytes)

    arena = Arena(backend.device, offset)
    new = arena.written(out)
    status = backend.scatter_unpack(
        arena.read(torch.from_numpy(raw.copy()).view(shape), offset=0),
        new,
        geometry.capacity,
        bits.PAYLOAD_VALUES[payload_bytes.CODES[geometry.dtype]],
        scale,
        accumulate,
        arena.read(out_scale),
    )
    arena.check()

    expected, expected_status = scatter_unpack_oracle.scatter_unpack(
        payloads,
        bits.numbers(out),
        geometry,
        bits.name(out.dtype),
        scale,
        accumulate,
        None if out_scale is None else out_scale.item(),
    )
    assert status.dtype == torch.int32
    bits.assert_equal(status.cpu().numpy(), expected_status, "status")
    bits.assert_floats(new, expected, "out", any_nan=True)
    return new.cpu(), status.tolist()


def random_payload(geometry, density, seed, pool, flags=0):
    """One rank's payload: `density` of every range's elements, values drawn from `pool`."""
    rng = np.random.default_rng([seed, geometry.numel, geometry.ranges])
    rows = []
    for r in range(geometry.ranges):
        low, high = geometry.bounds(r)
        count = min(geometry.capacity, round(density * (high - low)))
        indices = np.sort(rng.choice(high - low, count, replace=False))
        values = bits.raw(pool)[rng.integers(0, len(pool), count)]
        row = bytearray([PREFILL]) * geometry.nbytes
        content = payload_bytes.content(geometry, r, indices, values, flags)
        payload_bytes.write(row, geometry, content)
        rows.append(bytes(row))
    return rows
