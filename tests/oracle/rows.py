"""row_pack, row_gather and row_unpack with lists and loops, one row at a time."""

import numpy as np

from . import floats


def encoding(width, k):
    """(name, bytes per row) of the smallest encoding; the first one wins ties."""
    choices = [("bitmap", -(-width // 8))]
    if width <= 256:
        choices.append(("uint8", k))
    if width <= 65536:
        choices.append(("uint16", 2 * k))
    return min(choices, key=lambda choice: choice[1])


def encode(columns, width, k):
    name, nbytes = encoding(width, k)
    if name == "uint8":
        return bytes(columns)
    if name == "uint16":
        return b"".join(int(column).to_bytes(2, "little") for column in columns)
    packed = bytearray(nbytes)
    for column in columns:
        packed[column // 8] |= 1 << column % 8
    return bytes(packed)


def decode(raw, width, k):
    """The column of each of the k slots, or None if the slot is invalid."""
    name, _ = encoding(width, k)
    if name == "bitmap":
        columns = [c for c in range(width) if raw[c // 8] >> c % 8 & 1][:k]
        return columns + [None] * (k - len(columns))
    size = 1 if name == "uint8" else 2
    slots, highest = [], -1
    for j in range(k):
        column = int.from_bytes(raw[j * size : (j + 1) * size], "little")
        if highest < column < width:
            highest = column
            slots.append(column)
        else:
            slots.append(None)
    return slots


def largest(row, k):
    """Ascending columns of the k largest magnitudes; NaN ranks as inf. Ties go to lower columns."""
    magnitudes = np.where(np.isnan(row), np.inf, np.abs(row))
    return sorted(np.argsort(-magnitudes, kind="stable")[:k].tolist())


def row_pack(x, k, dtype):
    """Return raw values [rows, k] and position bytes [rows, bytes]."""
    columns = [largest(row, k) for row in x]
    values = [row[chosen] for row, chosen in zip(x, columns, strict=True)]
    raw = [list(encode(chosen, x.shape[1], k)) for chosen in columns]
    width = encoding(x.shape[1], k)[1]
    return (
        floats.narrow(np.array(values, np.float32).reshape(len(x), k), dtype),
        np.array(raw, np.uint8).reshape(len(x), width),
    )


def row_gather(x, positions, k, dtype):
    """Return raw values [rows, k]."""
    values = np.zeros((len(x), k), np.float32)
    for b, row in enumerate(x):
        for j, column in enumerate(decode(positions[b].tobytes(), x.shape[1], k)):
            if column is not None:
                values[b, j] = row[column]
    return floats.narrow(values, dtype)


def row_unpack(values, positions, width, dtype):
    """Return raw rows [rows, width]."""
    out = np.zeros((len(values), width), np.float32)
    for b, row in enumerate(values):
        for j, column in enumerate(decode(positions[b].tobytes(), width, len(row))):
            if column is not None:
                out[b, column] = row[j]
    return floats.narrow(out, dtype)
