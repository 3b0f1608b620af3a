"""Eager diff_pack, patch_check, patch_apply and checksum."""

import torch
from torch import Tensor

from .. import layout, patch_layout
from ..patch_layout import BLOCK, FULL_VALUE
from .rounding import round_to


def diff_pack(
    weights: Tensor, snapshot: Tensor, patch: Tensor, checksums: Tensor | None, capacity: int
) -> None:
    if weights.dtype != snapshot.dtype:
        weights = round_to(weights, snapshot.dtype)
    new, old = _bits(weights), _bits(snapshot)
    index = (new != old).nonzero().flatten()
    step = ((new - old)[index] + 0x8000 & 0xFFFF) - 0x8000
    full = step.abs() > patch_layout.LARGEST_STEP
    entry = index % BLOCK << 4 | torch.where(full, FULL_VALUE, step & 15)
    block, blocks = index // BLOCK, patch_layout.num_blocks(new.numel())
    # The full values of a block follow its entries.
    order = torch.cat([2 * block, 2 * block[full] + 1]).argsort(stable=True)
    words = torch.cat([entry, new[index[full]]])[order]
    entries = block.bincount(minlength=blocks)
    numbers = torch.stack([entries, entries + block[full].bincount(minlength=blocks)], 1)

    kind = (layout.MAGIC, patch_layout.VERSION, patch_layout.DTYPE_CODES[snapshot.dtype])
    flags = layout.FLAG_OVERFLOW if words.numel() > capacity else 0
    count = min(words.numel(), patch_layout.MOST_WORDS)
    header = layout.HEADER.pack(*kind, flags, new.numel(), capacity, count, bytes(40))
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
    return torch.tensor([_read(patch, numel, dtype)[0]], dtype=torch.int32, device=patch.device)


def patch_apply(patch: Tensor, weights: Tensor) -> Tensor:
    status, index, code, values = _read(patch, weights.numel(), weights.dtype)
    new = _bits(weights)[index] + (code ^ 8) - 8
    new[code == FULL_VALUE] = values
    weights.view(torch.int16)[index] = new.to(torch.int16)
    return torch.tensor([status], dtype=torch.int32, device=patch.device)


def checksum(weights: Tensor) -> Tensor:
    return _checksum(_bits(weights)).view(1)


def _read(patch: Tensor, numel: int, dtype: torch.dtype) -> tuple[int, Tensor, Tensor, Tensor]:
    """Validate a patch. Return its status; elements and codes of valid entries; full values."""
    none = torch.empty(0, dtype=torch.int64, device=patch.device)
    at, nbytes = patch_layout.words_offset(numel), patch.numel()
    if nbytes < at:
        return 1, none, none, none
    fields = layout.read_header("patch_apply", "patch", patch)
    magic, version, code, flags, size, capacity, count, reserved = fields
    kind = (layout.MAGIC, patch_layout.VERSION, patch_layout.DTYPE_CODES[dtype], numel)
    if (magic, version, code, size) != kind or flags & ~layout.FLAG_OVERFLOW or any(reserved):
        return 1, none, none, none
    if flags & layout.FLAG_OVERFLOW:
        return 8, none, none, none
    if count > capacity or at + 2 * count > nbytes:
        return 1, none, none, none

    entries, words = _section(patch, layout.HEADER_BYTES, at).view(-1, 2).unbind(1)
    block = torch.arange(len(words), dtype=torch.int64, device=patch.device)
    length = (numel - block * BLOCK).clamp(max=BLOCK)
    bad = (entries > length) | (words < entries) | (words > 2 * entries)
    if bool(bad.any()) or int(words.sum()) != count:
        return 2, none, none, none

    owner = block.repeat_interleave(words)
    place = (
        torch.arange(count, dtype=torch.int64, device=patch.device)
        - (words.cumsum(0) - words)[owner]
    )
    word, is_entry = _section(patch, at, at + 2 * count), place < entries[owner]
    entry, block, value_block = word[is_entry], owner[is_entry], owner[~is_entry]
    position, codes = entry >> 4, entry & 15
    bad = block[codes == FULL_VALUE].bincount(minlength=len(words)) != words - entries
    bad[block[position >= length[block]]] = True
    bad[block[1:][(position[1:] <= position[:-1]) & (block[1:] == block[:-1])]] = True
    good, values = ~bad[block], word[~is_entry][~bad[value_block]]
    return 4 * int(bad.any()), (block * BLOCK + position)[good], codes[good], values


def _checksum(bits: Tensor) -> Tensor:
    """The checksum of bit patterns. Products and sums wrap."""
    four = torch.nn.functional.pad(bits, (0, -bits.numel() % 4)).view(-1, 4)
    group = torch.arange(len(four), dtype=torch.int64, device=bits.device)
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
