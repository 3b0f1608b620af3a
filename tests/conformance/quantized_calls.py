"""Runs the ops on dense payloads and compares results with the oracle, like `calls.py`."""

import functools
from typing import NamedTuple

import numpy as np
import torch
from oracle import floats
from oracle import quantized_payload as oracle
from oracle.quantized_payload import Geometry

from conformance import bits, samples
from conformance.calls import PREFILL, compare_rows, neutral_gradient, summed
from conformance.memory import Arena


class Packed(NamedTuple):
    residual: torch.Tensor | None
    rows: list  # bytes of each range
    geometry: Geometry

    @property
    def flags(self):
        """The flags of each range."""
        return [row[7] for row in self.rows]

    @property
    def values(self):
        """The decoded payload, as float32 numbers."""
        bounds = map(self.geometry.bounds, range(len(self.rows)))
        return np.concatenate(
            [
                oracle.decode(row[oracle.HEADER_BYTES :], high - low, self.geometry.format)
                for row, (low, high) in zip(self.rows, bounds, strict=True)
            ]
        )


def quantize_pack(backend, residual, grad, format, ranges=None, inv_scale=None, room=0, offset=0):
    """Run quantize_pack, compare residual and payload bytes with the oracle, and return them.

    With `grad=None`, nothing is added to the residual. The payload is [nbytes] if `ranges` is
    None, otherwise [ranges, nbytes]. Each payload is `room` bytes longer than needed. The rows of a
    matrix are its ranges.
    """
    grad = neutral_gradient(residual) if grad is None else grad
    ranges = len(grad) if grad.dim() == 2 else ranges
    geometry = Geometry(grad.numel(), format, ranges or 1, room, grad.dim() == 2)
    shape = (geometry.nbytes,) if ranges is None else (ranges, geometry.nbytes)

    arena = Arena(backend.device, offset)
    new = None if residual is None else arena.written(residual)
    payload = arena.written(torch.full(shape, PREFILL, dtype=torch.uint8), offset=0)
    backend.quantize_pack(new, arena.read(grad), payload, format, arena.read(inv_scale))
    arena.check()

    rows = [bytearray([PREFILL]) * geometry.nbytes for _ in range(geometry.ranges)]
    expected = oracle.quantize_pack(
        None if residual is None else bits.numbers(residual).reshape(-1),
        bits.numbers(grad).reshape(-1),
        rows,
        geometry,
        None if inv_scale is None else inv_scale.item(),
    )
    return _compared(new, expected, payload, rows, geometry)


def dequantize_sum(backend, payloads, geometry, *options, **named):
    """Run dequantize_sum, compare out and status with the oracle, and return them; see `summed`."""
    op = backend.dequantize_sum, oracle.dequantize_sum
    named["shape"] = geometry.shape
    return summed(backend, op, (geometry.format,), payloads, geometry, *options, **named)


def _compared(residual, expected_residual, payload, rows, geometry):
    compare_rows(payload, rows)
    if residual is not None:
        bits.assert_floats(residual.view(-1), expected_residual.view(np.uint32), "residual")
        residual = residual.cpu()
    return Packed(residual, list(map(bytes, rows)), geometry)


def numbers(numel, dtype=torch.float32, seed=0):
    """[numel] numbers, with one kind of values per group of 64.

    Most groups are finite, because a single NaN makes the whole decoded group NaN.
    """
    return _numbers(numel, dtype, seed).clone()


@functools.cache  # computed once for all backends
def _numbers(numel, dtype, seed):
    n, rng = -(-numel // 64), np.random.default_rng([seed, numel])
    normal = samples.normal(64 * n, dtype, seed).view(n, 64)
    largest = 15 if dtype == torch.float16 else 127
    sizes = torch.from_numpy(2.0 ** rng.integers(-largest - 20, largest - 2, (n, 1)))
    kinds = [normal] * 4 + [
        (normal * sizes).to(dtype),
        samples.hard(64 * n, dtype, seed, non_finite=False).view(n, 64),
        -3 * torch.eye(64, dtype=dtype)[torch.arange(n) % 64],
        samples.hard(64 * n, dtype, seed).view(n, 64),
    ]
    chosen = torch.from_numpy(rng.integers(0, len(kinds), n))
    return torch.stack(kinds)[chosen, torch.arange(n)].reshape(-1)[:numel]


def random_payload(geometry, seed=0, flags=0):
    """One rank's payload: random codes with scales around 1, or normally distributed values."""
    rng = np.random.default_rng([seed, geometry.numel, geometry.ranges])
    rows = []
    for r in range(geometry.ranges):
        low, high = geometry.bounds(r)
        nrows = -(-(high - low) // oracle.ROW)
        if geometry.format in oracle.WITH_SCALES:
            size = oracle.ROW_BYTES[geometry.format]
            body = rng.integers(0, 256, (nrows, size), dtype=np.uint8)
            scales = np.exp(rng.standard_normal((nrows, 16)).astype(np.float32))
            body[:, -32:] = floats.narrow(scales, "bfloat16").view(np.uint8)
        else:
            normal = rng.standard_normal(nrows * oracle.ROW).astype(np.float32)
            body = floats.narrow(normal, geometry.format)
        row = oracle.header(high - low, geometry.format, flags) + body.tobytes()
        rows.append(row + bytes([PREFILL]) * (geometry.nbytes - len(row)))
    return rows


def payloads(geometry, ranks):
    return [random_payload(geometry, rank) for rank in range(ranks)]


def packed_values(geometry, *values):
    """One rank's payload of one range: `values`, then zeros, packed by the oracle."""
    acc = np.zeros(geometry.numel, np.float32)
    acc[: len(values)] = values
    row = bytearray([PREFILL]) * geometry.nbytes
    oracle.quantize_pack(None, acc, [row], geometry)
    return [bytes(row)]
