"""patch_check and patch_apply of patches from a faulty or hostile peer.

Status and weights match the oracle, and no other memory is read or written.
"""

import struct

import numpy as np
import pytest
import torch
from oracle import patch as oracle

from conformance import bits, patch_calls, samples

BF16, NUMEL = torch.bfloat16, 2 * 4096 + 100
AT = oracle.words_offset(NUMEL)
# (entries, full values) of three blocks. The last block has 100 elements.
BLOCKS = (
    ([0x0001, 0x0028, 0x0FF8, 0xFFFF], [0x1234, 0xFFFF]),
    ([0x00A7, 0x7FF9], []),
    ([0x0008, 0x0638], [0x7FC0, 0x8000]),
)


def weights():
    return samples.hard(NUMEL, BF16)


def patch(blocks=BLOCKS, **numbers):
    """A patch of these blocks, in which fields of the header or 16-bit numbers are changed."""
    raw = bytearray(oracle.content(NUMEL, "bfloat16", blocks))
    for name, value in numbers.items():
        form, at = FIELDS[name]
        struct.pack_into(form, raw, at, value)
    return raw


FIELDS = {"magic": ("<I", 0), "version": ("<H", 4), "dtype": ("<B", 6), "flags": ("<B", 7)}
FIELDS |= {"numel": ("<Q", 8), "capacity": ("<I", 16), "count": ("<I", 20), "reserved": ("<Q", 24)}
for b in range(3):
    FIELDS |= {f"entries{b}": ("<H", 64 + 4 * b), f"words{b}": ("<H", 66 + 4 * b)}

WRONG = [
    *((1, {"version": version}) for version in (0, 1, 4, 6, 0xFFFF)),
    *((1, {"dtype": code}) for code in (0, 2, 255)),
    *((1, {"numel": n}) for n in (0, NUMEL - 1, NUMEL + 1, 2**63, 2**64 - 1)),
    *((1, {"flags": flags}) for flags in (2, 3, 128)),
    *((1, {"capacity": capacity}) for capacity in (0, 11)),
    *((1, {"count": count}) for count in (13, 2**31, 2**32 - 1)),
    *((1, each) for each in ({"count": 13, "capacity": 2**32 - 1}, {"magic": 0})),
    (1, {"reserved": 2**63}),
    *((8, each) for each in ({"flags": 1}, {"flags": 1, "count": 2**32 - 1, "capacity": 1})),
    *((2, {"count": count}) for count in (0, 11)),
    *((2, {"entries0": n}) for n in (0, 1, 2, 7, 4097, 0xFFFF)),
    *((2, {"words0": n}) for n in (0, 3, 5, 7, 9, 0xFFFF)),
    *((2, {"entries2": n}) for n in (101, 0xFFFF)),
    (2, {"words0": 5, "words2": 2, "entries2": 1}),
    (2, {"words1": 2**15, "entries1": 2**15}),
    (4, {"words0": 5, "words1": 3}),  # a full value moves to the next block
    *((4, each) for each in ({"entries0": 3}, {"entries0": 5, "entries2": 3})),
    (4, {"entries1": 1, "words1": 2}),
]


@pytest.mark.parametrize(("status", "changes"), WRONG)
def test_wrong_numbers(backend, status, changes):
    found, new = patch_calls.patch_apply(backend, patch(**changes), weights(), offset=1)
    assert found == status
    if status != 4:
        bits.assert_floats(new, bits.raw(weights()), "weights")


def test_the_patch_without_changes_is_valid(backend):
    """So the tests above fail for the intended reason. A step of 0 changes nothing."""
    assert patch_calls.patch_apply(backend, patch(), weights())[0] == 0
    steps = patch([([0x0000, 0x0010], []), ([], []), ([], [])])
    status, new = patch_calls.patch_apply(backend, steps, weights())
    assert status == 0
    bits.assert_floats(new, bits.raw(weights()), "weights")


@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("fault", ["duplicate", "descending", "past the end", "one value too few"])
def test_wrong_words_void_their_block(backend, b, fault):
    blocks = [(list(entries), values) for entries, values in BLOCKS]
    entries = blocks[b][0]
    if fault == "duplicate":
        entries[1] = entries[0] & 0xFFF0 | entries[1] & 15
    elif fault == "descending":
        entries.reverse()
    elif fault == "past the end" and b == 2:
        entries[1] = 100 << 4 | 8
    else:
        entries[0] = (entries[0] & 0xFFF0) | (8 if entries[0] & 15 != 8 else 1)
    status, new = patch_calls.patch_apply(backend, patch(blocks), weights())
    assert status == 4
    expected = patch_calls.patch_apply(backend, patch(), weights())[1]
    block = slice(4096 * b, 4096 * (b + 1))
    expected[block] = weights()[block]
    bits.assert_floats(new, bits.raw(expected), "weights")


def test_more_full_values_than_a_block_has_elements(backend):
    """4,096 entries that are all full values, and the same with one element less in the tensor."""
    entries = [(position << 4) | 8 for position in range(4096)]
    for numel, status in ((4096, 0), (4095, 2)):
        raw = oracle.content(numel, "bfloat16", [(entries, list(range(4096)))])
        assert patch_calls.patch_apply(backend, raw, samples.hard(numel, BF16))[0] == status


@pytest.mark.many_launches
def test_truncated_patches(backend):
    raw = patch()
    for size in (*range(0, 64, 7), *range(63, len(raw))):
        assert patch_calls.patch_apply(backend, raw[:size], weights())[0] == 1


@pytest.mark.many_launches
def test_every_bit(backend):
    """A flipped bit of the header is detected."""
    raw = patch()
    for bit in range(8 * len(raw)):
        flipped = raw.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        status, _ = patch_calls.patch_apply(backend, flipped, weights())
        assert status != 0 or bit >= 512 or 128 <= bit < 160  # a larger capacity is allowed


@pytest.mark.many_launches
@pytest.mark.parametrize("seed", range(4))
def test_random_bytes(backend, seed):
    """Random bytes, with a valid header, and also with valid numbers of the blocks."""
    rng = np.random.default_rng(seed)
    found = set()
    for number in range(30):
        raw = bytearray(rng.bytes(int(rng.integers(0, 400))))
        if number % 3 and len(raw) > AT:
            room = (len(raw) - AT) // 2
            raw[:64] = oracle.header(NUMEL, "bfloat16", room, room)
            if number % 3 == 2:
                words = np.diff([0, *np.sort(rng.integers(0, room + 1, 2)), room])
                entries = -(-words // rng.integers(1, 3))
                struct.pack_into("<6H", raw, 64, *np.stack([entries, words], 1).flatten())
        found.add(patch_calls.patch_apply(backend, raw, weights())[0])
    assert found >= {1, 2, 4}


def test_other_weights(backend):
    """The number of elements and the dtype of the weights must match."""
    for numel, dtype in ((NUMEL - 1, BF16), (0, BF16), (NUMEL, torch.float16)):
        assert patch_calls.patch_apply(backend, patch(), samples.hard(numel, dtype))[0] == 1
    for numel in (0, 2**40, 2**63 - 1):
        raw = torch.frombuffer(patch(), dtype=torch.uint8).to(backend.device)
        assert backend.patch_check(raw, numel, BF16).tolist() == [1]
