"""Weight patches (payload version 5) and checksums, from docs/reference/payload.md.

Weights are numpy uint16 arrays of raw bits.
"""

import itertools
import math
import struct

import numpy as np

BLOCK, HEADER_BYTES = 4096, 64
CODES = {"bfloat16": 1, "float16": 2}
MOST_WORDS = 2**32 - 1
WORD_KEY, BLOCK_KEY = 0x9E3779B1, 0x9E3779B97F4A7C15


def words_offset(numel):
    return HEADER_BYTES + 4 * math.ceil(numel / BLOCK)


def nbytes(numel, capacity):
    return math.ceil((words_offset(numel) + 2 * capacity) / 16) * 16


def header(numel, dtype, capacity, count):
    flags = 1 if count > capacity else 0
    numbers = (numel, capacity, min(count, MOST_WORDS))
    return struct.pack("<4sHBBQII40x", b"DCT1", 5, CODES[dtype], flags, *numbers)


def diff_pack(new, old, dtype, capacity):
    """The used part of a patch, and the words of each block, as (entries, full values)."""
    blocks = [([], []) for _ in range(math.ceil(len(new) / BLOCK))]
    for i in np.flatnonzero(new != old).tolist():
        entries, values = blocks[i // BLOCK]
        step = (int(new[i]) - int(old[i]) + 32768) % 65536 - 32768
        code = step % 16 if abs(step) <= 7 else 8
        entries.append(i % BLOCK * 16 + code)
        values += [int(new[i])] if code == 8 else []
    return content(len(new), dtype, blocks, capacity), blocks


def content(numel, dtype, blocks, capacity=None):
    """The used part of a patch with these blocks."""
    words = [word for entries, values in blocks for word in entries + values]
    numbers = [n for entries, values in blocks for n in (len(entries), len(entries + values))]
    capacity = max(len(words), 1) if capacity is None else capacity
    numbers += words[:capacity]
    head = header(numel, dtype, capacity, len(words))
    return head + struct.pack(f"<{len(numbers)}H", *numbers)


def patch_apply(patch, weights, dtype):
    """Return the status, and the new weights."""
    numel, at = len(weights), words_offset(len(weights))
    if len(patch) < at:
        return 1, weights
    magic, version, code, flags, size, capacity, count, reserved = struct.unpack(
        "<4sHBBQII40s", patch[:HEADER_BYTES]
    )
    expected = (b"DCT1", 5, CODES[dtype], numel, bytes(40))
    if (magic, version, code, size, reserved) != expected or flags not in (0, 1):
        return 1, weights
    if flags == 1:
        return 8, weights
    if count > capacity or count > (len(patch) - at) // 2:
        return 1, weights
    blocks = list(struct.iter_unpack("<HH", patch[HEADER_BYTES:at]))
    for b, (entries, words) in enumerate(blocks):
        if not entries <= min(BLOCK, numel - b * BLOCK) or not entries <= words <= 2 * entries:
            return 2, weights
    if sum(words for _, words in blocks) != count:
        return 2, weights
    stream = struct.unpack(f"<{count}H", patch[at : at + 2 * count])
    weights, status = weights.copy(), 0
    for b, (entries, words) in enumerate(blocks):
        first, values = list(stream[:entries]), list(stream[entries:words])
        stream = stream[words:]
        here = weights[b * BLOCK : (b + 1) * BLOCK]
        positions, codes = [word // 16 for word in first], [word % 16 for word in first]
        ascends = all(a < z for a, z in itertools.pairwise(positions))
        if not ascends or max(positions, default=-1) >= len(here) or codes.count(8) != len(values):
            status = 4
            continue
        for position, code in zip(positions, codes, strict=True):
            old, step = int(here[position]), code if code < 8 else code - 16
            here[position] = values.pop(0) if code == 8 else (old + step) % 65536
    return status, weights


def checksum(bits):
    """The checksum of raw bits, as a signed integer."""
    total = 0
    for b, begin in enumerate(range(0, len(bits), BLOCK)):
        block = bits[begin : begin + BLOCK].tolist()
        block += [0] * (-len(block) % 4)
        words = [
            (block[i] + 65536 * block[i + 1] + (i // 2 + 1) * WORD_KEY) % 2**32
            for i in range(0, len(block), 2)
        ]
        hashed = sum(words[i] * words[i + 1] for i in range(0, len(words), 2))
        total += hashed * (2 * b + 1) * BLOCK_KEY
    return (total + 2**63) % 2**64 - 2**63
