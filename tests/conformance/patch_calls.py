"""Runs the ops on weight patches and compares results with the oracle, like `calls.py`."""

from typing import NamedTuple

import numpy as np
import torch
from oracle import floats
from oracle import patch as oracle

from conformance import bits
from conformance.calls import PREFILL
from conformance.memory import Arena
from dct_kernels import patch_bytes, patch_info


class Packed(NamedTuple):
    sent: bytes  # the used part
    blocks: list  # (entries, full values) of each block


def diff_pack(backend, weights, snapshot, capacity=None, checksums=True, offset=0):
    """Run diff_pack, compare the bytes and checksums with the oracle, and return the patch.

    The default capacity suffices for all changes.
    """
    numel, dtype = snapshot.numel(), bits.name(snapshot.dtype)
    capacity = 2 * numel + 3 if capacity is None else capacity
    arena = Arena(backend.device, offset)
    size = oracle.nbytes(numel, capacity)
    patch = arena.written(torch.full((size,), PREFILL, dtype=torch.uint8), offset=0)
    sums = arena.written(torch.full((2,), -77, dtype=torch.int64)) if checksums else None
    backend.diff_pack(arena.read(weights), arena.read(snapshot), patch, sums, capacity)
    arena.check()

    old, new = bits.raw(snapshot), bits.raw(weights)
    if weights.dtype != snapshot.dtype:
        new = floats.narrow(bits.numbers(weights), dtype)
    sent, blocks = oracle.diff_pack(new, old, dtype, capacity)
    expected = sent + bytes([PREFILL]) * (size - len(sent))
    bits.assert_equal(patch.cpu().numpy(), np.frombuffer(expected, np.uint8), "patch")
    need = sum(len(entries + values) for entries, values in blocks)
    info = (snapshot.dtype, numel, need, need > capacity, oracle.words_offset(numel) + 2 * need)
    assert patch_info(patch) == patch_info(patch[:64]) == info
    assert patch_bytes(numel, capacity) == size
    if checksums:
        assert sums.tolist() == [oracle.checksum(old), oracle.checksum(new)]
    return Packed(sent, blocks)


def patch_apply(backend, raw, weights, offset=0):
    """Run patch_check and patch_apply on bytes, compare with the oracle, return (status, weights).

    The patch has memory of its exact size, so ASan detects any access past its end.
    """
    dtype = bits.name(weights.dtype)
    arena = Arena(backend.device, offset)
    patch = torch.tensor(list(raw), dtype=torch.uint8).to(backend.device)
    new = arena.written(weights)
    found = backend.patch_check(patch, weights.numel(), weights.dtype)
    bits.assert_floats(new, bits.raw(weights), "weights before patch_apply")
    status = backend.patch_apply(patch, new)
    arena.check()
    assert patch.tolist() == list(raw)
    expected, values = oracle.patch_apply(bytes(raw), bits.raw(weights), dtype)
    assert found.dtype == status.dtype == torch.int32
    assert found.tolist() == status.tolist() == [expected]
    bits.assert_floats(new, values, "weights")
    return expected, new.cpu()


STEPS = (*range(-9, 10), 0x7FFF, 0x8000, 0x8001, 256, -256)


def changed(old, density, seed=0, steps=STEPS):
    """A copy in which a fraction of the entries changes, by random steps of the bit pattern."""
    rng = np.random.default_rng([seed, old.numel()])
    step = np.where(rng.random(old.numel()) < density, rng.choice(steps, old.numel()), 0)
    return bits.from_raw((bits.raw(old) + step) % 65536, old.dtype)
