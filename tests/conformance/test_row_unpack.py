"""row_gather and row_unpack: values computed by hand, and arbitrary positions."""

import math

import numpy as np
import pytest
import torch
from oracle import rows as oracle

from conformance import bits
from conformance.test_row_pack import SHAPES, WIDE, check_gather, check_unpack, hard_rows

x_dtypes = pytest.mark.parametrize("dtype", bits.FLOATS, ids=bits.name)
out_dtypes = pytest.mark.parametrize("out_dtype", bits.FLOATS, ids=bits.name)


def positions_of(columns, width, k):
    """Encode lists of columns as uint8 [rows, bytes]."""
    raw = b"".join(oracle.encode(row, width, k) for row in columns)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(len(columns), -1)


def check(backend, width, k, positions):
    """Compare both ops with the oracle at these positions."""
    rows, f32 = len(positions), torch.float32
    gathered = check_gather(backend, hard_rows(rows, width), k, positions, f32)
    return gathered, check_unpack(backend, hard_rows(rows, k), width, positions, f32)


def test_by_hand(backend):
    x = torch.tensor([[10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0]])
    bitmap = torch.tensor([[0b00100110]], dtype=torch.uint8)
    assert check_gather(backend, x, 3, bitmap, torch.float32).tolist() == [[11.0, 12.0, 15.0]]
    out = check_unpack(backend, torch.tensor([[1.0, -0.0, math.nan]]), 8, bitmap, torch.float32)
    assert bits.raw(out).tolist() == [[0, 0x3F800000, 0x80000000, 0, 0, 0x7FC00000, 0, 0]]


UINT8 = (100, 4)  # width, k
BITMAP = (20, 4)


@pytest.mark.parametrize(
    ("shape", "positions", "accepted"),
    [
        (UINT8, [1, 5, 5, 9], [1, 5, None, 9]),
        (UINT8, [5, 1, 3, 6], [5, None, None, 6]),
        (UINT8, [3, 200, 4, 5], [3, None, 4, 5]),
        (UINT8, [99, 0, 1, 2], [99, None, None, None]),
        (UINT8, [0, 0, 0, 0], [0, None, None, None]),
        (UINT8, [100, 255, 7, 8], [None, None, 7, 8]),
        (UINT8, [255, 254, 253, 100], [None] * 4),
        (BITMAP, [0b00000011, 0, 0], [0, 1, None, None]),
        (BITMAP, [0, 0, 0], [None] * 4),
        (BITMAP, [0, 0, 0b11110000], [None] * 4),
        (BITMAP, [0b11111111, 0, 0], [0, 1, 2, 3]),
        (BITMAP, [0b1, 0b1, 0b11111001], [0, 8, 16, 19]),
        (BITMAP, [255, 255, 255], [0, 1, 2, 3]),
    ],
)
def test_invalid_positions_are_ignored(backend, shape, positions, accepted):
    """Columns must ascend. Set bits after the k-th one or past the width are ignored. An invalid
    slot gathers 0, scatters nothing, and does not affect later slots."""
    width, k = shape
    positions = torch.tensor([positions], dtype=torch.uint8)
    x, values = torch.arange(1.0, width + 1).view(1, width), torch.arange(1.0, k + 1).view(1, k)
    gathered = check_gather(backend, x, k, positions, torch.float32)
    assert gathered.tolist() == [[0.0 if c is None else c + 1.0 for c in accepted]]
    out = check_unpack(backend, values, width, positions, torch.float32)
    expected = {c: j + 1.0 for j, c in enumerate(accepted) if c is not None}
    assert {c: out[0, c].item() for c in out[0].nonzero().flatten().tolist()} == expected


@pytest.mark.parametrize(("width", "k"), [*SHAPES, *WIDE])
def test_garbage_positions(backend, width, k):
    """Positions are random bytes, random bytes mixed with zeros, all zeros, or all ones."""
    nbytes = oracle.encoding(width, k)[1]
    rng = np.random.default_rng([width, k])
    rows = 40 if width < 2000 else 2
    garbage = rng.integers(0, 256, (rows, nbytes), dtype=np.uint8)
    sparse = np.where(rng.random((rows, nbytes)) < 0.5, garbage, 0).astype(np.uint8)
    for raw in (garbage, sparse, garbage[:1] * 0, garbage[:1] * 0 + np.uint8(255)):
        check(backend, width, k, torch.from_numpy(raw.copy()))
