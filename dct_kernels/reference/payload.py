"""Eager mask_pack and scatter_unpack."""

import torch
from torch import Tensor

from .. import layout
from .rounding import round_to
from .thresholds import scaled


def mask_pack(
    residual: Tensor,
    grad: Tensor,
    threshold: Tensor,
    payload: Tensor,
    seen: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    inv_scale: Tensor | None = None,
) -> None:
    numel = residual.numel()
    rows = payload.view(-1, payload.shape[-1])
    offsets = layout.payload_layout(numel, capacity, value_dtype, len(rows))
    for r, row in enumerate(rows):
        low, high = layout.range_bounds(numel, len(rows), r)
        old = residual[low:high]
        acc = old + scaled(grad[low:high], inv_scale)
        finite = acc.isfinite()
        passed = (~(acc.abs() < threshold[r]) & (acc != 0)).nonzero().flatten()
        seen[r] = min(passed.numel(), 2**31 - 1)

        index = passed[:capacity]
        values = round_to(acc[index], value_dtype, saturate=True)
        flags = 0
        if passed.numel() > capacity:
            flags |= layout.FLAG_OVERFLOW
        if not bool(finite.all()):
            flags |= layout.FLAG_NON_FINITE
        _write(row, offsets, high - low, capacity, value_dtype, flags, index, values)

        left = acc.clone()
        left[index] -= values.to(torch.float32)
        old.copy_(torch.where(finite, left, torch.where(old.isfinite(), old, 0.0)))


def _write(
    row: Tensor,
    offsets: layout.PayloadLayout,
    numel: int,
    capacity: int,
    value_dtype: torch.dtype,
    flags: int,
    index: Tensor,
    values: Tensor,
) -> None:
    header = layout.HEADER.pack(
        layout.MAGIC,
        layout.VERSION,
        layout.VALUE_DTYPE_CODES[value_dtype],
        flags,
        numel,
        capacity,
        index.numel(),
        bytes(40),
    )
    blocks = torch.arange(layout.range_blocks(numel, 1) + 1, dtype=torch.int64, device=row.device)
    edges = blocks * layout.BLOCK
    starts = torch.searchsorted(index, edges)
    sections = [
        (0, torch.tensor(list(header), dtype=torch.uint8, device=row.device)),
        (offsets.starts, starts.to(torch.uint32)),
        (offsets.positions, (index % layout.BLOCK).to(torch.uint16)),
        (offsets.values, values),
    ]
    for offset, section in sections:
        raw = section.view(torch.uint8)
        row[offset : offset + raw.numel()] = raw


def scatter_unpack(
    payloads: Tensor,
    out: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    scale: float = 1.0,
    out_scale: Tensor | None = None,
) -> Tensor:
    ranks, nbytes = payloads.shape[0], payloads.shape[-1]
    rows = payloads.view(ranks, payloads.shape[1] if payloads.dim() == 3 else 1, nbytes)
    ranges = rows.shape[1]
    offsets = layout.payload_layout(out.numel(), capacity, value_dtype, ranges)
    status = torch.zeros(ranks, dtype=torch.int32, device=out.device)
    total = torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
    for p in range(ranks):
        for r in range(ranges):
            low, high = layout.range_bounds(out.numel(), ranges, r)
            status[p] |= _add(total[low:high], rows[p, r], offsets, capacity, value_dtype)
    factor = torch.tensor(scale, dtype=torch.float32, device=out.device)
    if out_scale is not None:
        factor = factor * out_scale.reshape(())
    out.copy_(round_to(0.0 + factor * total, out.dtype))  # -0.0 becomes +0.0
    return status


def _add(
    total: Tensor,
    row: Tensor,
    offsets: layout.PayloadLayout,
    capacity: int,
    value_dtype: torch.dtype,
) -> int:
    """Validate one payload, add its valid blocks to `total`, and return its status."""
    numel = total.numel()
    fields = layout.read_header("scatter_unpack", "payloads", row)
    magic, version, code, flags, *sizes, count, reserved = fields
    lost = layout.FLAG_OVERFLOW | layout.FLAG_NON_FINITE
    if (
        (magic, version, code) != (layout.MAGIC, layout.VERSION, _code(value_dtype))
        or sizes != [numel, capacity]
        or count > min(capacity, numel)
        or flags & ~lost
        or any(reserved)
    ):
        return 1
    if numel == 0:
        return 0 if int(_section(row, offsets.starts, 1, torch.uint32)[0]) == 0 else 2

    blocks = layout.range_blocks(numel, 1)
    starts = _section(row, offsets.starts, blocks + 1, torch.uint32).to(torch.int64)
    first, end = starts[:-1], starts[1:]
    bad_starts = (first > end) | (end > count)
    bad_starts[0] |= first[0] != 0
    bad_starts[-1] |= end[-1] != count

    block = torch.arange(blocks, dtype=torch.int64, device=row.device)
    length = (numel - block * layout.BLOCK).clamp(max=layout.BLOCK)
    # A block with more entries than elements is rejected before its positions are read, because
    # they cannot be strictly ascending.
    bad_positions = ~bad_starts & (end - first > length)
    block = block[~bad_starts & ~bad_positions]
    entries = (end - first)[block]
    owner = block.repeat_interleave(entries)
    place = torch.arange(owner.numel(), dtype=torch.int64, device=row.device)
    place -= (entries.cumsum(0) - entries).repeat_interleave(entries)
    entry = first[owner] + place
    position = _section(row, offsets.positions, count, torch.uint16).to(torch.int64)[entry]
    ascending = torch.ones_like(position, dtype=torch.bool)
    ascending[1:] = (position[1:] > position[:-1]) | (owner[1:] != owner[:-1])
    bad_positions[owner[~ascending | (position >= length[owner])]] = True

    valid = ~bad_positions[owner]
    index = owner[valid] * layout.BLOCK + position[valid]
    values = _section(row, offsets.values, count, value_dtype)[entry[valid]]
    total[index] = total[index] + values.to(torch.float32)
    if flags & lost == lost:
        total[0] = torch.nan
    return 2 * int(bad_starts.any()) | 4 * int(bad_positions.any())


def _code(value_dtype: torch.dtype) -> int:
    return layout.VALUE_DTYPE_CODES[value_dtype]


def _section(row: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    # A clone, because view(dtype) requires a storage offset that is a multiple of the itemsize.
    return row[offset : offset + count * dtype.itemsize].clone().view(dtype)
