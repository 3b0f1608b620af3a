"""Eager mask_pack and scatter_unpack."""

import torch
from torch import Tensor

from .. import layout
from . import e3m0
from .rounding import round_to
from .thresholds import scaled

Sections = list[tuple[int, Tensor]]  # byte offset, content


def mask_pack(
    residual: Tensor,
    grad: Tensor | None,
    segments: Tensor,
    threshold: Tensor,
    payload: Tensor,
    seen: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    inv_scale: Tensor | None = None,
    status: Tensor | None = None,
    value_format: str = "",
    scale: Tensor | None = None,
) -> None:
    numel = residual.numel()
    tau = threshold.repeat_interleave(segments.diff(), output_size=numel)
    active = ~(tau < 0)
    acc = residual if grad is None else residual + scaled(grad, inv_scale)
    finite = acc.isfinite()
    kept = active & ~(acc.abs() < tau) & (acc != 0)

    running = torch.cat([segments.new_zeros(1), kept.cumsum(0)])
    seen.copy_(running[segments].diff().clamp(max=2**31 - 1))

    rows = payload.view(-1, payload.shape[-1])
    bounds = [layout.range_bounds(numel, len(rows), r) for r in range(len(rows))]
    scales = None if scale is None else e3m0.nearest_scale(scale.reshape(-1))
    if scales is None:
        code = round_to(acc, value_dtype, saturate=True)
        value = code.to(torch.float32)
    else:
        lengths = torch.tensor([high - low for low, high in bounds], device=residual.device)
        each = scales.repeat_interleave(lengths, output_size=numel)
        kept &= e3m0.holds(acc, each)
        code = e3m0.encode(acc, each)
        value = e3m0.decode(code, each)

    packed = torch.zeros_like(kept)
    damage = layout.FLAG_DAMAGE if status is not None and bool((status != 0).any()) else 0
    offsets = layout.payload_layout(numel, capacity, value_format or value_dtype, len(rows))
    for r, (low, high) in enumerate(bounds):
        passed = kept[low:high].nonzero().flatten()
        index = passed[:capacity]
        packed[low + index] = True
        flags = damage
        if passed.numel() > capacity:
            flags |= layout.FLAG_OVERFLOW
        if bool((active & ~finite)[low:high].any()):
            flags |= layout.FLAG_NON_FINITE
        if scales is None:
            kind = layout.VERSION, layout.VALUE_DTYPE_CODES[value_dtype]
            sections = _sections(offsets, high - low, index, code[low + index])
        else:
            kind = layout.E3M0_VERSION, layout.E3M0_CODE
            sub_starts = layout.sub_starts(numel, len(rows))
            sections = _e3m0_sections(offsets, sub_starts, high - low, index, code[low + index])
        reserved = bytes(40) if scales is None else int(scales[r]).to_bytes(40, "little")
        header = layout.HEADER.pack(
            layout.MAGIC, *kind, flags, high - low, capacity, index.numel(), reserved
        )
        sections.append((0, torch.tensor(list(header), dtype=torch.uint8, device=payload.device)))
        for offset, section in sections:
            raw = section.view(torch.uint8)
            rows[r][offset : offset + raw.numel()] = raw

    old = torch.where(residual.isfinite(), residual, 0.0)
    left = torch.where(packed, acc - value, acc)
    residual.copy_(torch.where(active, torch.where(finite, left, old), residual))


def _sections(offsets: layout.PayloadLayout, numel: int, index: Tensor, values: Tensor) -> Sections:
    return [
        (offsets.starts, _starts(numel, index).to(torch.uint32)),
        (offsets.positions, (index % layout.BLOCK).to(torch.uint16)),
        (offsets.values, values),
    ]


def _e3m0_sections(
    offsets: layout.PayloadLayout, sub_starts: int, numel: int, index: Tensor, codes: Tensor
) -> Sections:
    starts = _starts(numel, index)
    blocks = torch.arange(len(starts) - 1, device=index.device) * layout.BLOCK
    later = torch.arange(layout.SUB_BLOCK, layout.BLOCK, layout.SUB_BLOCK, device=index.device)
    in_block = torch.searchsorted(index, blocks[:, None] + later) - starts[:-1, None]
    return [
        (offsets.starts, starts.to(torch.uint32)),
        (sub_starts, in_block.flatten().to(torch.uint16)),
        (offsets.positions, (index % layout.SUB_BLOCK << 4 | codes).to(torch.uint16)),
    ]


def _starts(numel: int, index: Tensor) -> Tensor:
    edges = torch.arange(0, numel + layout.BLOCK, layout.BLOCK, device=index.device)
    return torch.searchsorted(index, edges[: layout.range_blocks(numel, 1) + 1])


def scatter_unpack(
    payloads: Tensor,
    out: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    scale: float = 1.0,
    accumulate: bool = False,
    out_scale: Tensor | None = None,
    value_format: str = "",
) -> Tensor:
    ranks, nbytes = payloads.shape[0], payloads.shape[-1]
    rows = payloads.view(ranks, payloads.shape[1] if payloads.dim() == 3 else 1, nbytes)
    ranges = rows.shape[1]
    status = torch.zeros(ranks, dtype=torch.int32, device=out.device)
    total = torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
    values = value_format or value_dtype
    offsets = layout.payload_layout(out.numel(), capacity, values, ranges)
    sub_starts = layout.sub_starts(out.numel(), ranges)
    for p in range(ranks):
        for r in range(ranges):
            low, high = layout.range_bounds(out.numel(), ranges, r)
            status[p] |= _add(total[low:high], rows[p, r], offsets, sub_starts, capacity, values)
    factor = torch.tensor(scale, dtype=torch.float32, device=out.device)
    if out_scale is not None:
        factor = factor * out_scale.reshape(())
    base = out.to(torch.float32) if accumulate else torch.zeros_like(total)
    out.copy_(round_to(base + factor * total, out.dtype))
    return status


def _add(
    total: Tensor,
    row: Tensor,
    offsets: layout.PayloadLayout,
    sub_starts: int,
    capacity: int,
    values: torch.dtype | str,
) -> int:
    """Validate one rank's payload of one range, add its sound blocks to `total`, return status."""
    numel = total.numel()
    raw = bytes(row[: layout.HEADER_BYTES].tolist())
    magic, version, code, flags, *sizes, count, rest = layout.HEADER.unpack(raw)
    reserved = int.from_bytes(rest, "little")
    lost = layout.FLAG_OVERFLOW | layout.FLAG_NON_FINITE
    if isinstance(values, torch.dtype):
        kind_ok = (version, code) == (layout.VERSION, layout.VALUE_DTYPE_CODES[values])
        kind_ok &= reserved == 0
    else:
        kind_ok = (version, code) == (layout.E3M0_VERSION, layout.E3M0_CODE)
        kind_ok &= layout.LEAST_SCALE <= reserved <= layout.MOST_SCALE
        lost = layout.FLAG_NON_FINITE  # non-finite entries are never sent
    if (
        magic != layout.MAGIC
        or not kind_ok
        or sizes != [numel, capacity]
        or count > min(capacity, numel)
        or flags & ~(layout.FLAG_OVERFLOW | layout.FLAG_NON_FINITE | layout.FLAG_DAMAGE)
    ):
        return 1
    if numel == 0:
        return 0 if int(_section(row, offsets.starts, 1, torch.uint32)[0]) == 0 else 2

    # Positions count in groups: blocks, or in "e3m0" their sub-blocks.
    blocks = layout.range_blocks(numel, 1)
    starts = _section(row, offsets.starts, blocks + 1, torch.uint32).to(torch.int64)
    edges = torch.stack([starts[:-1], starts[1:]], 1)
    if values == layout.E3M0:
        inner = _section(row, sub_starts, layout.SUB_STARTS * blocks, torch.uint16)
        inner = inner.to(torch.int64).view(blocks, layout.SUB_STARTS) + starts[:-1, None]
        edges = torch.cat([edges[:, :1], inner, edges[:, 1:]], 1)
    bad_starts = (edges.diff() < 0).any(1) | (starts[1:] > count)
    bad_starts[0] |= starts[0] != 0
    bad_starts[-1] |= starts[-1] != count

    first, entries = edges[:, :-1].flatten(), edges.diff().flatten()
    groups = edges.shape[1] - 1
    size = layout.BLOCK // groups
    group = torch.arange(blocks * groups, device=row.device)
    length = (numel - group * size).clamp(0, size)
    sound_starts = ~bad_starts.repeat_interleave(groups)
    # More entries than elements cannot ascend strictly: bad without looking.
    bad_positions = sound_starts & (entries > length)
    group = group[sound_starts & ~bad_positions]
    entries = entries[group]
    owner = group.repeat_interleave(entries)
    place = torch.arange(owner.numel(), device=row.device)
    place -= (entries.cumsum(0) - entries).repeat_interleave(entries)
    entry = first[owner] + place
    position = _section(row, offsets.positions, count, torch.uint16).to(torch.int64)[entry]
    if isinstance(values, torch.dtype):
        value = _section(row, offsets.values, count, values)[entry].to(torch.float32)
    else:
        codes = (position & 15).to(torch.int32)
        value = e3m0.decode(codes, torch.full_like(codes, reserved))
        position >>= 4
    ascending = torch.ones_like(position, dtype=torch.bool)
    ascending[1:] = (position[1:] > position[:-1]) | (owner[1:] != owner[:-1])
    bad_positions[owner[~ascending | (position >= length[owner])]] = True
    bad_positions = bad_positions.view(blocks, groups).any(1)

    sound = ~bad_positions[owner // groups]
    index = owner[sound] * size + position[sound]
    total[index] = total[index] + value[sound]
    if flags & lost == lost:
        total[0] = torch.nan
    return 2 * int(bad_starts.any()) | 4 * int(bad_positions.any())


def _section(row: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    # Cloned, so that any view of a payload can be reinterpreted, whatever its storage offset.
    return row[offset : offset + count * dtype.itemsize].clone().view(dtype)
