"""Dense payloads: a header, then rows of 1,024 entries (codes and then scales, or values)."""

from dataclasses import dataclass

import numpy as np

from . import floats, payload, quantized_rows

CODES = {"float32": 0, "bfloat16": 1, "int8": 4, "int4": 5, "ternary": 6}
FORMATS = tuple(CODES)
WITH_SCALES = ("int8", "int4", "ternary")
ROW_BYTES = {"float32": 4096, "bfloat16": 2048, "int8": 1056, "int4": 544, "ternary": 240}
VERSION, HEADER_BYTES, ROW, GROUP = 4, 64, 1024, 64


@dataclass(frozen=True)
class Geometry:
    """The parameters that sender and receiver share; `room` bytes follow the longest range."""

    numel: int
    format: str
    ranges: int = 1
    room: int = 0
    matrix: bool = False  # whether the tensor is a matrix, whose rows are the ranges

    def bounds(self, r):
        if self.matrix:
            return self.numel // self.ranges * r, self.numel // self.ranges * (r + 1)
        return payload.bounds(self.numel, self.ranges, r)

    @property
    def shape(self):
        return (self.ranges, self.numel // self.ranges) if self.matrix else (self.numel,)

    @property
    def nbytes(self):
        _, longest = self.bounds(0)
        return HEADER_BYTES + -(-longest // ROW) * ROW_BYTES[self.format] + self.room


def header(numel, format, flags=0):
    entries = min(numel, 2**32 - 1)
    kind = payload.MAGIC, VERSION, CODES[format], flags
    return payload.HEADER.pack(*kind, numel, entries, entries, bytes(40))


def quantize_pack(residual, grad, rows, geometry, inv_scale=None):
    """Return the new residual; write payloads into `rows`, one bytearray per range.

    `residual` and `grad` are float32 arrays. With `residual=None` the new residual is None.
    """
    acc = floats.accumulate(residual, grad, inv_scale)
    new = None if residual is None else np.where(np.isfinite(residual), residual, np.float32(0))
    for r, row in enumerate(rows):
        low, high = geometry.bounds(r)
        body, values, sent = encode(acc[low:high], geometry.format)
        flags = 0 if sent.all() else payload.NON_FINITE
        row[: HEADER_BYTES + len(body)] = header(high - low, geometry.format, flags) + body
        if residual is not None:
            with np.errstate(invalid="ignore"):
                left = acc[low:high] - values
            new[low:high] = np.where(sent, left, new[low:high])
    return new


def encode(acc, format):
    """(bytes of the rows of `acc`, decoded float32 values, mask of the entries that are sent)."""
    padded = np.zeros(-(-len(acc) // ROW) * ROW, np.float32)
    padded[: len(acc)] = acc
    if format not in WITH_SCALES:
        bits = floats.narrow(padded, format, saturate=True)
        body, values, sent = bits.tobytes(), floats.widen(bits, format), np.isfinite(padded)
    else:
        groups = quantized_rows.row_quantize(padded.reshape(-1, GROUP), format)
        parts = []
        for row in groups.reshape(-1, ROW // GROUP, groups.shape[1]):
            parts += [row[:, :-2].tobytes(), row[:, -2:].tobytes()]
        body, values = b"".join(parts), _values(groups, format)
        sent = np.isfinite(padded.reshape(-1, GROUP)).all(1).repeat(GROUP)
        # 127 times the largest int8 scale and 7 times the largest int4 scale are finite.
        assert np.isfinite(values[sent]).all()
    return body, values[: len(acc)], sent[: len(acc)]


def decode(body, numel, format):
    """The float32 values of rows with arbitrary bytes."""
    size = -(-numel // ROW) * ROW_BYTES[format]
    raw = np.frombuffer(body, np.uint8)[:size].reshape(-1, ROW_BYTES[format])
    if format not in WITH_SCALES:
        return floats.widen(np.frombuffer(raw.tobytes(), floats.BITS[format]), format)[:numel]
    codes = raw[:, :-32].reshape(-1, (ROW_BYTES[format] - 32) // (ROW // GROUP))
    scales = raw[:, -32:].reshape(-1, 2)
    return _values(np.concatenate([codes, scales], 1), format)[:numel]


def dequantize_sum(payloads, geometry, out_dtype, scale=1.0, out_scale=None):
    """Return the raw bits of `out` and the status of ranks; `payloads[p][r]` are bytes."""
    total = np.zeros(geometry.numel, np.float32)
    status = np.zeros((len(payloads), geometry.ranges), np.int32)
    with np.errstate(all="ignore"):
        for p, rows in enumerate(payloads):
            for r, row in enumerate(rows):
                low, high = geometry.bounds(r)
                if _is_valid_header(row[:HEADER_BYTES], high - low, geometry.format):
                    values = decode(row[HEADER_BYTES:], high - low, geometry.format)
                    total[low:high] = total[low:high] + values
                else:
                    status[p, r] = 1
        bits = floats.narrow(floats.factor(scale, out_scale) * total, out_dtype)
        return bits.reshape(geometry.shape), status if geometry.matrix else status.max(1)


def pack_mean(payloads, residual, row, geometry):
    """Return the new residual and the status of every rank; write the payload into `row`."""
    bits, status = dequantize_sum([[p] for p in payloads], geometry, "float32", 1 / len(payloads))
    return quantize_pack(residual, floats.widen(bits, "float32"), [row], geometry), status


def _is_valid_header(raw, numel, format):
    return any(raw == header(numel, format, flags) for flags in (0, payload.NON_FINITE))


def _values(groups, format):
    table = np.array([quantized_rows.codes_of(byte, format) for byte in range(256)], float)
    each, nbytes = table.shape[1], groups.shape[1] - 2
    codes = table[groups[:, :-2]].reshape(len(groups), nbytes * each)
    scales = floats.widen(groups[:, -2:].copy().view(np.uint16), "bfloat16").astype(np.float64)
    with np.errstate(all="ignore"):
        return (codes[:, :GROUP] * scales).astype(np.float32).reshape(-1)
