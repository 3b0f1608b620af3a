"""Runs ops of a backend on guarded copies of their arguments; compares results with the oracle."""

from typing import NamedTuple

import numpy as np
import torch
from oracle import mask_pack as mask_pack_oracle
from oracle import payload as payload_bytes
from oracle import scatter_unpack as scatter_unpack_oracle
from oracle import thresholds

from conformance import bits
from conformance.memory import Arena

PREFILL = 0x5A  # fills payloads before the op runs; unused bytes must keep this value


class Packed(NamedTuple):
    residual: torch.Tensor
    seen: torch.Tensor
    contents: list  # oracle.payload.Content of each range
    rows: list  # bytes of each range
    geometry: payload_bytes.Geometry


def neutral_gradient(residual):
    """A gradient that leaves the residual unchanged, including the sign of zeros."""
    return torch.full_like(residual, -0.0)


def sample_threshold(
    backend, grad, residual, density, ranges=1, inv_scale=None, offset=0, **options
):
    """Run sample_threshold, compare the thresholds with the oracle, and return them.

    With `residual=None`, nothing is added to the gradient.
    """
    if residual is None:
        residual = neutral_gradient(grad.float())
    arena = Arena(backend.device, offset)
    result = backend.sample_threshold(
        arena.read(grad),
        arena.read(residual),
        density,
        ranges,
        inv_scale=arena.read(inv_scale),
        **options,
    )
    arena.check()
    expected = thresholds.sample_threshold(
        bits.numbers(grad),
        bits.numbers(residual),
        density,
        ranges,
        inv_scale=None if inv_scale is None else inv_scale.item(),
        **options,
    )
    assert result.dtype == torch.float32
    bits.assert_floats(result, expected.view(np.uint32), "threshold")
    return result.cpu()


def mask_pack(
    backend,
    residual,
    grad,
    threshold,
    capacity=None,
    value_dtype=torch.float32,
    ranges=None,
    inv_scale=None,
    offset=0,
):
    """Run mask_pack, compare residual, seen and payload bytes with the oracle, and return them.

    With `grad=None`, nothing is added to the residual. `threshold` is one number, or a list with
    one number per range. The payload is [nbytes] if `ranges` is None, otherwise [ranges, nbytes].
    The default capacity suffices for all entries.
    """
    numel = residual.numel()
    grad = neutral_gradient(residual) if grad is None else grad
    capacity = max(numel, 1) if capacity is None else capacity
    geometry = payload_bytes.Geometry(numel, capacity, bits.name(value_dtype), ranges or 1)
    shape = (geometry.nbytes,) if ranges is None else (ranges, geometry.nbytes)
    threshold = torch.as_tensor(threshold, dtype=torch.float32).expand(geometry.ranges)

    arena = Arena(backend.device, offset)
    new = arena.written(residual)
    payload = arena.written(torch.full(shape, PREFILL, dtype=torch.uint8), offset=0)
    seen = arena.written(torch.full((geometry.ranges,), -77, dtype=torch.int32))
    backend.mask_pack(
        new,
        arena.read(grad),
        arena.read(threshold),
        payload,
        seen,
        capacity,
        value_dtype,
        arena.read(inv_scale),
    )
    arena.check()

    rows = [bytearray([PREFILL]) * geometry.nbytes for _ in range(geometry.ranges)]
    expected_residual, expected_seen = mask_pack_oracle.mask_pack(
        bits.numbers(residual),
        bits.numbers(grad),
        threshold.numpy(),
        rows,
        geometry,
        None if inv_scale is None else inv_scale.item(),
    )
    bits.assert_equal(seen.cpu().numpy(), expected_seen, "seen")
    bits.assert_floats(new, expected_residual.view(np.uint32), "residual")
    compare_rows(payload, rows)
    contents = [payload_bytes.read(row, geometry, r) for r, row in enumerate(rows)]
    return Packed(new.cpu(), seen.cpu(), contents, [bytes(row) for row in rows], geometry)


def scatter_unpack(backend, payloads, geometry, *options, **named):
    """Run scatter_unpack, compare out and status with the oracle, and return them; see `summed`."""
    settings = geometry.capacity, bits.PAYLOAD_VALUES[payload_bytes.CODES[geometry.dtype]]
    op = backend.scatter_unpack, scatter_unpack_oracle.scatter_unpack
    return summed(backend, op, settings, payloads, geometry, *options, **named)


def summed(
    backend,
    op,
    settings,
    payloads,
    geometry,
    out_dtype=torch.float32,
    scale=1.0,
    out_scale=None,
    three_dims=False,
    offset=0,
    shape=None,
):
    """Run an op that sums payloads, compare out and status with the oracle, and return them.

    `op` is (the backend's op, the oracle's function). `settings` are the arguments after `out`.
    `payloads[p][r]` are the bytes of range r from rank p. The op's payload tensor is
    [ranks, ranges, nbytes], or [ranks, nbytes] if there is one range and `three_dims` is false.
    """
    call, oracle = op
    arena = Arena(backend.device, offset)
    out = arena.written(torch.full(shape or (geometry.numel,), torch.nan, dtype=out_dtype))
    given = arena.read(stacked(payloads, geometry, three_dims), offset=0)
    status = call(given, out, *settings, scale, arena.read(out_scale))
    arena.check()
    factor = None if out_scale is None else out_scale.item()
    expected, expected_status = oracle(payloads, geometry, bits.name(out_dtype), scale, factor)
    assert status.dtype == torch.int32
    bits.assert_equal(status.cpu().numpy(), expected_status, "status")
    bits.assert_floats(out, expected, "out", any_nan=True)
    return out.cpu(), status.tolist()


def stacked(payloads, geometry, three_dims=False):
    """The payloads as uint8 [ranks, ranges, nbytes] or [ranks, nbytes]; see `summed`."""
    raw = np.frombuffer(b"".join(b"".join(rows) for rows in payloads), np.uint8)
    shape = (len(payloads), geometry.ranges, geometry.nbytes)
    if geometry.ranges == 1 and not three_dims:
        shape = (len(payloads), geometry.nbytes)
    return torch.from_numpy(raw.copy()).view(shape)


def compare_rows(payload, rows):
    """Compare every byte of a payload tensor, range by range."""
    actual = payload.cpu().view(len(rows), -1).numpy()
    for r, row in enumerate(rows):
        bits.assert_equal(actual[r], np.frombuffer(row, np.uint8), f"payload of range {r}")


def random_payload(geometry, density, seed, pool, flags=0):
    """One rank's payload of random entries with values from `pool`, limited by the capacity."""
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
