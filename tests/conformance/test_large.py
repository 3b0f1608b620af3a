"""More than 2**31 elements need 64-bit indices. Runs on the compiled CPU kernels only.

The tests are deselected by default; run them with `pytest -m large`. In most tests, only a few
planted entries are nonzero, so no second tensor with the expected results is necessary. Pages that
are never touched take no memory.
"""

import math

import numpy as np
import pytest
import torch
from conftest import BACKENDS
from oracle import floats, patch, payload, quantized_payload, thresholds

NUMEL = 2**31 + 2**22 + 16385
PLANTED = (0, 16384, 2**30, 2**31 - 1, 2**31, 2**31 + 1, NUMEL - 2, NUMEL - 1)
LAST = NUMEL - 16385  # the first element of the last two blocks

pytestmark = pytest.mark.large
CPP = BACKENDS.get("cpp")


@pytest.fixture(autouse=True)
def compiled(poisoned_memory):
    assert CPP is not None, "the large tests need the compiled CPU kernels"
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling would touch every page


def planted(dtype, indices=PLANTED, numel=NUMEL):
    """Zeros, with the values 1, 2, 3, ... at the planted indices."""
    x = torch.zeros(numel, dtype=dtype)
    x[list(indices)] = torch.arange(1.0, len(indices) + 1).to(dtype)
    return x


def assert_planted(x, scale=1, indices=PLANTED):
    assert x[list(indices)].tolist() == [scale * rank for rank in range(1, len(indices) + 1)]
    assert torch.count_nonzero(x) == len(indices)


def test_sample_threshold():
    """Needs 13 GB. Checks sampled indices against Python integers, and the last range's result."""
    grad, residual = planted(torch.bfloat16), torch.zeros(NUMEL)
    picks = thresholds.picks(NUMEL, 1000, seed=5, r=0)
    assert max(picks) > 2**31
    grad[picks[-1]] = 77.0
    assert CPP.sample_threshold(grad, residual, 0.001, 1, 1000, 5).tolist() == [77.0]
    # A single stratum has more than 2**31 elements, so hash * length can exceed 2**63.
    grad[thresholds.picks(NUMEL, 1, seed=11, r=0)] = 55.0
    assert CPP.sample_threshold(grad, residual, 1.0, 1, 1, 11).tolist() == [55.0]
    # Each range has two blocks. The threshold of the last range is its second largest entry.
    ranges = math.ceil(NUMEL / 32768)
    low, _ = payload.bounds(NUMEL, ranges, ranges - 1)
    result = CPP.sample_threshold(grad, residual, 2 / (NUMEL - low), ranges, 40000, 5)
    assert result[-1] == sorted(grad[low:].tolist())[-2] == len(PLANTED) - 1


@pytest.mark.parametrize("ranges", [1, 3])
def test_mask_pack_and_scatter_unpack(ranges):
    """Needs 13 GB for a float32 residual and a bfloat16 gradient, which the result overwrites."""
    residual, grad = torch.zeros(NUMEL), planted(torch.bfloat16)
    geometry = payload.Geometry(NUMEL, 20, "bfloat16", ranges)
    packed = torch.zeros(ranges, geometry.nbytes, dtype=torch.uint8)
    seen = torch.empty(ranges, dtype=torch.int32)
    CPP.mask_pack(residual, grad, torch.full((ranges,), 0.5), packed, seen, 20, torch.bfloat16)
    bounds = [geometry.bounds(r) for r in range(ranges)]
    assert seen.tolist() == [sum(low <= i < high for i in PLANTED) for low, high in bounds]
    found = {}
    for r, row in enumerate(packed.numpy()):
        content = payload.read(row.tobytes(), geometry, r)
        low, high = bounds[r]
        assert (content.numel, content.flags) == (high - low, 0)
        values = floats.widen(np.array(content.values), "bfloat16")
        found |= dict(zip((low + i for i in payload.indices(content)), values, strict=True))
    assert found == {index: rank for rank, index in enumerate(PLANTED, start=1)}
    assert torch.count_nonzero(residual) == 0

    assert CPP.scatter_unpack(packed.unsqueeze(0), grad, 20, torch.bfloat16, 2.0).tolist() == [0]
    assert_planted(grad, 2)


def test_seen_saturates_and_a_range_overflows():
    """Needs 13 GB. More entries pass than int32 can count. All except one stay in the residual."""
    residual, grad = torch.ones(NUMEL), torch.zeros(NUMEL, dtype=torch.bfloat16)
    geometry = payload.Geometry(NUMEL, 1, "float32")
    packed = torch.zeros(geometry.nbytes, dtype=torch.uint8)
    seen = torch.empty(1, dtype=torch.int32)
    CPP.mask_pack(residual, grad, torch.ones(1), packed, seen, 1, torch.float32)
    assert seen.item() == 2**31 - 1
    content = payload.read(packed.numpy().tobytes(), geometry, 0)
    assert (content.count, content.flags) == (1, payload.OVERFLOW)
    assert content.starts == [0] + [1] * (math.ceil(NUMEL / payload.BLOCK))
    assert residual[0] == 0
    assert torch.count_nonzero(residual) == NUMEL - 1


def test_dense_payload():
    """Needs 10 GB. Packs more than 2**32 ternary entries. The sum overwrites `grad`."""
    numel = 2**32 + 16384 + 5
    where = (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 16383, numel - 1)
    grad = planted(torch.bfloat16, where, numel)
    payload = torch.zeros(quantized_payload.Geometry(numel, "ternary").nbytes, dtype=torch.uint8)
    CPP.quantize_pack(None, grad, payload, "ternary")
    assert payload[:64].numpy().tobytes() == quantized_payload.header(numel, "ternary")
    assert CPP.dequantize_sum(payload.unsqueeze(0), grad, "ternary", 2.0).tolist() == [0]
    assert_planted(grad, 2, where)


def test_dense_payload_of_several_ranges():
    """Needs 10 GB. Three ranges hold the same rows as a single range."""
    where, ranges = (0, 2**30, 2**31 - 1, 2**31, LAST, NUMEL - 1), 3  # in separate groups of 64
    residual, grad = planted(torch.float32, where), torch.zeros(NUMEL, dtype=torch.bfloat16)
    geometry = quantized_payload.Geometry(NUMEL, "ternary", ranges)
    rows = torch.zeros(ranges, geometry.nbytes, dtype=torch.uint8)
    flat = torch.zeros(quantized_payload.Geometry(NUMEL, "ternary").nbytes, dtype=torch.uint8)
    CPP.quantize_pack(residual, grad, rows, "ternary")
    assert torch.count_nonzero(residual) == 0
    del residual, grad
    CPP.quantize_pack(None, planted(torch.bfloat16, where), flat, "ternary")
    begin = 64
    for r, row in enumerate(rows):
        low, high = geometry.bounds(r)
        assert row[:64].numpy().tobytes() == quantized_payload.header(high - low, "ternary")
        size = math.ceil((high - low) / 1024) * 240
        assert torch.equal(row[64 : 64 + size], flat[begin : begin + size])
        begin += size
    assert begin == flat.numel()
    del flat
    out = torch.empty(NUMEL, dtype=torch.bfloat16)
    assert CPP.dequantize_sum(rows.unsqueeze(0), out, "ternary").tolist() == [0]
    assert_planted(out, 1, where)


def test_patch():
    """Needs 9 GB. Packs, checks and applies changes past 2**31 elements, and counts past 2**32."""
    old, new = torch.zeros(NUMEL, dtype=torch.bfloat16), planted(torch.bfloat16)
    raw = torch.zeros(patch.nbytes(NUMEL, 20), dtype=torch.uint8)
    checksums = torch.empty(2, dtype=torch.int64)
    CPP.diff_pack(new, old, raw, checksums, 20)
    assert raw[:64].numpy().tobytes() == patch.header(NUMEL, "bfloat16", 20, 2 * len(PLANTED))
    assert CPP.checksum(new).tolist() == checksums[1:].tolist()
    assert CPP.checksum(old).tolist() == checksums[:1].tolist() != checksums[1:].tolist()
    assert CPP.patch_check(raw, NUMEL, torch.bfloat16).tolist() == [0]
    assert CPP.patch_apply(raw, old).tolist() == [0]
    assert_planted(old)
    new.view(torch.int16).fill_(0x3F80)  # a full value in every entry
    old.zero_()
    CPP.diff_pack(new, old, raw, None, 20)
    assert raw[:64].numpy().tobytes() == patch.header(NUMEL, "bfloat16", 20, 2 * NUMEL)
    assert CPP.patch_apply(raw, old).tolist() == [8]


def test_row_ops():
    """Needs 4 GB. The last rows lie beyond 2**31 elements."""
    rows, width = 2**20 + 1, 2**11 + 1
    assert rows * width > 2**31
    x = torch.zeros(rows, width, dtype=torch.bfloat16)
    x[-1, -1], x[0, 0], x[2**20, 5] = 3.0, 4.0, -2.0
    values, positions = CPP.row_pack(x, 2, torch.float32)
    assert values[-1].tolist() == [-2.0, 3.0]
    assert values[0].tolist() == [4.0, 0.0]
    assert torch.equal(CPP.row_gather(x, positions, 2, torch.float32), values)
    del x
    dense = CPP.row_unpack(values, positions, width, torch.bfloat16)
    assert dense[-1].nonzero().flatten().tolist() == [5, width - 1]
    assert torch.count_nonzero(dense) == 3
