"""diff_pack: all bytes of patches, and checksums."""

import itertools

import numpy as np
import pytest
import torch
from oracle import patch as oracle

from conformance import bits, patch_calls, samples
from conformance.patch_calls import changed

BF16, F16 = torch.bfloat16, torch.float16
SIZES = (0, 1, 3, 4, 5, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, 8192, 3 * 4096 + 7)
dtypes = pytest.mark.parametrize("dtype", (BF16, F16), ids=bits.name)


def packed(backend, weights, snapshot, *args, **named):
    """Pack, and check that the whole patch and its prefix give the snapshot the new bits."""
    result = patch_calls.diff_pack(backend, weights, snapshot, *args, **named)
    offset = named.get("offset", 0)
    status, new = patch_calls.patch_apply(backend, result.sent, snapshot, offset)
    padded = result.sent + b"\xff" * 37
    assert patch_calls.patch_apply(backend, padded, snapshot, offset)[0] == status == 0
    if weights.dtype == snapshot.dtype:
        bits.assert_floats(new, bits.raw(weights), "weights")
    return result


@pytest.mark.parametrize("density", [0, 0.02, 0.3, 1])
@pytest.mark.parametrize("numel", SIZES)
def test_sizes(backend, numel, density):
    old = samples.hard(numel, BF16)
    packed(backend, changed(old, density), old, checksums=numel % 2 == 0, offset=numel % 3)


@dtypes
@pytest.mark.parametrize("density", [0.01, 1])
@pytest.mark.parametrize("shift", [0, 1])
def test_steps_from_every_bit_pattern(backend, dtype, density, shift):
    """Both zeros, subnormals, infinities and all NaNs occur, and steps wrap around."""
    old = bits.from_raw(np.roll(np.arange(2**16), shift), dtype)
    packed(backend, changed(old, density, seed=1), old)


def test_each_step(backend):
    old = bits.from_raw(np.full(len(patch_calls.STEPS), 0x3F80), BF16)
    new = bits.from_raw((bits.raw(old) + np.array(patch_calls.STEPS)) % 65536, BF16)
    ((entries, values),) = packed(backend, new, old).blocks
    codes = [word % 16 for word in entries]  # a step of 0 is no entry
    assert codes == [8, 8, *range(9, 16), *range(1, 8), *[8] * 7]
    assert len(values) == 9


def test_zeros_and_nans_with_other_bits_differ(backend):
    old = bits.from_raw([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0x7F80], BF16)
    new = bits.from_raw([0x8000, 0x0000, 0x7FC1, 0x7FC1, 0xFFFF], BF16)
    ((entries, _),) = packed(backend, new, old).blocks
    assert [word // 16 for word in entries] == [0, 1, 2, 4]


@dtypes
@pytest.mark.parametrize("numel", [0, 5, 4097, 3 * 4096 + 7])
def test_float32_weights(backend, dtype, numel):
    """The cast is compared: rounded to nearest even, with one NaN."""
    weights, old = samples.hard(numel), samples.hard(numel, dtype)
    nans = bits.from_raw(samples.NAN_BITS[:numel], torch.float32)
    weights[: len(nans)] = nans
    result = packed(backend, weights, old, offset=numel % 2)
    _, new = patch_calls.patch_apply(backend, result.sent, old)
    nan = 0x7FC0 if dtype == BF16 else 0x7E00
    assert bits.raw(new)[: len(nans)].tolist() == [nan] * len(nans)
    same = patch_calls.diff_pack(backend, weights, new)
    assert all(not entries for entries, _ in same.blocks)


@pytest.mark.parametrize("missing", [-1, 0, 1, 40, None])
@pytest.mark.parametrize("density", [0.01, 0.5])
def test_capacity_around_the_need(backend, density, missing):
    """The first `capacity` words are stored, and the header has the number that is needed."""
    old = samples.hard(5 * 4096 + 100, BF16)
    new = changed(old, density, seed=2)
    _, blocks = oracle.diff_pack(bits.raw(new), bits.raw(old), "bfloat16", 1)
    need = sum(len(entries + values) for entries, values in blocks)
    capacity = 1 if missing is None else need - missing
    if capacity >= need:
        packed(backend, new, old, capacity)
        return
    result = patch_calls.diff_pack(backend, new, old, capacity)
    for raw in (result.sent, result.sent + bytes(2 * need)):
        assert patch_calls.patch_apply(backend, raw, old)[0] == 8


def test_full_blocks_between_empty_ones(backend):
    """A few blocks hold all changes, and every change is a full value in one of them."""
    old = samples.hard(12 * 4096, BF16)
    new = old.clone()
    new[4096:8192] = changed(old[4096:8192], 1, steps=(1, -1))
    new[9 * 4096 : 10 * 4096] = changed(old[9 * 4096 : 10 * 4096], 1, steps=(0x8000,))
    capacity = 3 * 4096
    blocks = packed(backend, new, old, capacity).blocks
    assert {b: len(e + v) for b, (e, v) in enumerate(blocks) if e} == {1: 4096, 9: 8192}


@pytest.mark.many_programs
def test_many_blocks(backend):
    old = samples.hard(150 * 4096 + 5, BF16)
    packed(backend, changed(old, 0.01, seed=3), old, 20_000)


def checksum(backend, weights, offset=0):
    arena = patch_calls.Arena(backend.device, offset)
    result = backend.checksum(arena.read(weights))
    arena.check()
    assert result.dtype == torch.int64
    assert result.tolist() == [oracle.checksum(bits.raw(weights))]
    return result.item()


@dtypes
@pytest.mark.parametrize("numel", SIZES)
def test_checksum(backend, numel, dtype):
    checksum(backend, samples.hard(numel, dtype, seed=4), numel % 3)


def test_a_checksum_detects_errors_of_transfers(backend):
    """Flipped bits, swapped entries and blocks, a patch that is missing or applied twice."""
    # 0x9E3779B1 * 0x3C6EF362 * 0x9E3779B97F4A7C15 modulo 2**64, and 0 for no entries
    assert checksum(backend, torch.zeros(1, dtype=BF16)) == 3482255180180717546
    assert checksum(backend, torch.zeros(0, dtype=BF16)) == 0
    weights = samples.hard(3 * 4096, BF16, seed=4)
    wrong = [changed(weights, 0.01, seed=s, steps=(1,)) for s in range(3)]
    wrong += [weights.roll(1), weights.roll(4), weights.roll(4096), weights.flip(0)]
    for place, bit in itertools.product((0, 1, 4095, 4096, 3 * 4096 - 1), (0, 15)):
        flipped = bits.raw(weights).copy()
        flipped[place] ^= 1 << bit
        wrong.append(bits.from_raw(flipped, BF16))
    assert len({checksum(backend, each) for each in (weights, *wrong)}) == 1 + len(wrong)
