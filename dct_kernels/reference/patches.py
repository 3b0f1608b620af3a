"""Eager diff_pack, patch_check, patch_apply and checksum."""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import layout, patch_layout
from ..patch_layout import BLOCK
from .rounding import round_to


def diff_pack(
    weights: Tensor, snapshot: Tensor, patch: Tensor, checksums: Tensor | None, capacity: int
) -> None:
    if weights.dtype != snapshot.dtype:
        weights = round_to(weights, snapshot.dtype)
    new, old = _bits(weights), _bits(snapshot)
    index = (new != old).nonzero().flatten()
    step = (new - old)[index]
    step = ((step + 0x8000) & 0xFFFF) - 0x8000
    full = step.abs() > patch_layout.LARGEST_STEP
    code = torch.where(full, patch_layout.FULL_VALUE, step & 15)

    edges = _arange(patch_layout.num_blocks(new.numel()) + 1, patch) * BLOCK
    first_entry = torch.searchsorted(index, edges)  # of a block, in the whole tensor
    first_full = torch.searchsorted(index[full], edges)
    words = torch.empty(index.numel() + int(full.sum()), dtype=torch.int64, device=patch.device)
    # Entry i of the tensor follows i entries, and all full values of earlier blocks. Full value j
    # follows j full values, and all entries up to the end of its block.
    block = index // BLOCK
    words[_arange(index.numel(), patch) + first_full[block]] = (index % BLOCK) << 4 | code
    values = new[index[full]]
    words[_arange(values.numel(), patch) + first_entry[block[full] + 1]] = values

    kind = (layout.MAGIC, patch_layout.VERSION, patch_layout.DTYPE_CODES[snapshot.dtype])
    flags = layout.FLAG_OVERFLOW if words.numel() > capacity else 0
    count = min(words.numel(), patch_layout.MOST_WORDS)
    header = layout.HEADER.pack(*kind, flags, new.numel(), capacity, count, bytes(40))
    entries = first_entry.diff()
    numbers = torch.stack([entries, entries + first_full.diff()], 1)
    sections = [
        torch.tensor(list(header), dtype=torch.uint8, device=patch.device),
        numbers.to(torch.uint16).view(torch.uint8).flatten(),
        words[:capacity].to(torch.uint16).view(torch.uint8),
    ]
    raw = torch.cat(sections)
    patch[: raw.numel()] = raw
    if checksums is not None:
        checksums.copy_(torch.stack([_checksum(old), _checksum(new)]))


def patch_check(patch: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    status, _ = _read(patch, numel, dtype)
    return torch.tensor([status], dtype=torch.int32, device=patch.device)


def patch_apply(patch: Tensor, weights: Tensor) -> Tensor:
    status, entries = _read(patch, weights.numel(), weights.dtype)
    if entries is not None:
        index, code, value = entries
        step = (code ^ 8) - 8
        old = _bits(weights)[index]
        new = torch.where(code == patch_layout.FULL_VALUE, value, (old + step) & 0xFFFF)
        weights.view(torch.int16)[index] = new.to(torch.uint16).view(torch.int16)
    return torch.tensor([status], dtype=torch.int32, device=patch.device)


def checksum(weights: Tensor) -> Tensor:
    return _checksum(_bits(weights)).view(1)


class _Entries(NamedTuple):
    """The entries of all valid blocks. A value is arbitrary unless the code is FULL_VALUE."""

    element: Tensor
    code: Tensor
    value: Tensor


def _read(patch: Tensor, numel: int, dtype: torch.dtype) -> tuple[int, _Entries | None]:
    """Validate a patch. Return its status, and its valid entries if it is not ignored."""
    at, nbytes = patch_layout.words_offset(numel), patch.numel()
    if nbytes < at:
        return 1, None
    raw = bytes(patch[: layout.HEADER_BYTES].tolist())
    magic, version, code, flags, size, capacity, count, reserved = layout.HEADER.unpack(raw)
    kind = (layout.MAGIC, patch_layout.VERSION, patch_layout.DTYPE_CODES[dtype], numel)
    if (magic, version, code, size) != kind or flags & ~layout.FLAG_OVERFLOW or any(reserved):
        return 1, None
    if flags & layout.FLAG_OVERFLOW:
        return 8, None
    if count > capacity or at + 2 * count > nbytes:
        return 1, None

    numbers = _section(patch, layout.HEADER_BYTES, at).view(-1, 2)
    entries, words = numbers[:, 0], numbers[:, 1]
    block = _arange(len(numbers), patch)
    length = (numel - block * BLOCK).clamp(max=BLOCK)
    bad = (entries > length) | (words < entries) | (words > 2 * entries)
    if bool(bad.any()) or int(words.sum()) != count:
        return 2, None

    stream = _section(patch, at, at + 2 * count)
    first_word = words.cumsum(0) - words
    first_entry = entries.cumsum(0) - entries
    owner = block.repeat_interleave(entries)
    place = _arange(owner.numel(), patch) - first_entry[owner]
    word = stream[first_word[owner] + place]
    position, code = word >> 4, word & 15
    ascending = torch.ones_like(position, dtype=torch.bool)
    ascending[1:] = (position[1:] > position[:-1]) | (owner[1:] != owner[:-1])
    # The number of full values of the entries before each entry, and before the end.
    full_before = torch.nn.functional.pad((code == patch_layout.FULL_VALUE).cumsum(0), (1, 0))
    full = full_before[first_entry + entries] - full_before[first_entry]
    bad = full != words - entries
    bad[owner[~ascending | (position >= length[owner])]] = True

    good = ~bad[owner]
    owner, position, code = owner[good], position[good], code[good]
    value_at = full_before[:-1][good] - full_before[first_entry[owner]]
    value_at += first_word[owner] + entries[owner]
    value = torch.nn.functional.pad(stream, (0, 1))[value_at]  # one word past the last, if not full
    return 4 * int(bad.any()), _Entries(owner * BLOCK + position, code, value)


def _checksum(bits: Tensor) -> Tensor:
    """The checksum of bit patterns. Products and sums wrap."""
    four = torch.nn.functional.pad(bits, (0, -bits.numel() % 4)).view(-1, 4)
    group = _arange(len(four), bits)
    word = 2 * (group % (BLOCK // 4)) + 1  # counted from 1 in each block
    low = four[:, 0] + (four[:, 1] << 16) + word * patch_layout.WORD_KEY
    high = four[:, 2] + (four[:, 3] << 16) + (word + 1) * patch_layout.WORD_KEY
    factor = (2 * (group // (BLOCK // 4)) + 1) * patch_layout.BLOCK_KEY
    return ((low & 0xFFFFFFFF) * (high & 0xFFFFFFFF) * factor).sum()


def _bits(weights: Tensor) -> Tensor:
    """The bit patterns as numbers from 0 to 65535, int64."""
    return weights.view(torch.int16).to(torch.int64) & 0xFFFF


def _section(patch: Tensor, begin: int, end: int) -> Tensor:
    """The 16-bit numbers in these bytes, int64."""
    return patch[begin:end].clone().view(torch.int16).to(torch.int64) & 0xFFFF


def _arange(end: int, like: Tensor) -> Tensor:
    return torch.arange(end, dtype=torch.int64, device=like.device)
