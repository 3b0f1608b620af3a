"""Checks the oracle by brute force, and payload_layout against the published offsets."""

import numpy as np
import pytest
import torch
from oracle import floats, payload

from conformance import bits, samples
from dct_kernels import payload_layout


@pytest.mark.parametrize(("dtype", "past_the_last"), [("bfloat16", 2.0**128), ("float16", 2.0**16)])
def test_rounding_picks_the_nearest_representable_number(dtype, past_the_last):
    every = floats.widen(np.arange(2**16, dtype=np.uint16), dtype)
    codes = np.flatnonzero(~np.isnan(every))
    every = every[codes]
    x = np.concatenate([samples.patterns(500), samples.hard(500, non_finite=False), every[::97]])
    # Infinity stands for the number that would follow the largest one.
    every, clipped = (np.clip(v.astype(float), -past_the_last, past_the_last) for v in (every, x))
    for number, code in zip(clipped, floats.narrow(x, dtype), strict=True):
        distance = np.abs(every - number)
        same_sign = np.signbit(every) == np.signbit(number)
        nearest = codes[(distance == distance.min()) & same_sign].tolist()
        assert [int(code)] == [c for c in nearest if len(nearest) == 1 or c % 2 == 0]


def test_saturation_keeps_finite_numbers_finite_and_infinity_infinite():
    x = np.array([3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan, 1.0], np.float32)
    expected = [0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x3F80]
    assert floats.narrow(x, "bfloat16", saturate=True).tolist() == expected
    assert floats.narrow(x, "bfloat16").tolist() == [0x7F80, 0xFF80, *expected[2:]]


@pytest.mark.parametrize("ranges", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", bits.PAYLOAD_VALUES, ids=bits.name)
def test_payload_layout_matches_the_oracle(dtype, ranges):
    for numel in (*samples.SIZES, samples.LARGE, 2**31 + 16385, 2**40):
        for capacity in (1, 7, 8, 9, 4096, 2**32 - 1):
            expected = payload.Geometry(numel, capacity, bits.name(dtype), ranges)
            layout = payload_layout(numel, capacity, dtype, ranges)
            assert layout.nbytes == expected.nbytes
            assert layout.nbytes % 16 == 0
            sections = (expected.starts, expected.positions, expected.values)
            assert (layout.starts, layout.positions, layout.values) == sections


def test_payload_layout_by_hand():
    # One block: a header of 64 bytes and 2 starts, then 3 positions, then 3 values of 2 bytes.
    assert payload_layout(100, 3, torch.bfloat16) == (112, 64, 80, 96)
    # Two blocks: 3 starts of 4 bytes end at 76 (padded to 80), 9 positions at 98 (padded to 112).
    assert payload_layout(16385, 9, torch.float32) == (160, 64, 80, 112)
    # Two ranges of one block each.
    assert payload_layout(16385, 9, torch.float32, ranges=2) == (160, 64, 80, 112)
    assert payload_layout(0, 1, torch.float32) == (112, 64, 80, 96)
