"""Timed cases of each op: inputs, bytes that must be moved, and how inputs are restored."""

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from dct_kernels import patch_bytes, payload_layout, quantized_payload_bytes, testing
from dct_kernels.layout import QUANTIZED_CODES, range_bounds
from dct_kernels.row_layout import FORMATS, position_bytes, row_bytes

from . import peers
from .peers import Peer

F32, BF16 = torch.float32, torch.bfloat16
SAMPLES = 65536
RANGES = 8  # owners of a reduce-scatter
COLD_BYTES = 512 << 20  # total size of all buffer sets, larger than the caches
FIRST_LOOK_COLD_BYTES = 64 << 20  # smaller, because creating buffers takes most of the time
FIRST_LOOK_SIZES = {"cpu": 2**20, "cuda": 2**24}
MOST_SETS = 64
CHANGED = (0.0, 0.005, 0.03, 0.08, 0.3)  # fractions of weights that differ from the snapshot
FULL_VALUES = 0.02  # of the changed weights, whose new value is sent
CLUSTER = 64  # elements per row in clustered cases


@dataclass
class Case:
    """A timed case. `run(ops, i)` uses buffer set i; all backends must return equal tensors."""

    op: str
    detail: str
    numel: int
    nbytes: int  # bytes that must be read and written
    sets: int  # number of buffer sets
    run: Callable[[SimpleNamespace, int], tuple[Tensor, ...]]
    reset: Callable[[int], object] = field(default=lambda i: None)  # restores changed buffers
    allocates: bool = False  # whether `run`, and the copy it is compared with, allocate results
    density: float | None = None
    peers: dict[str, Peer] = field(default_factory=dict)


@contextlib.contextmanager
def buffers_of(nbytes: int) -> Iterator[None]:
    """In this context, the (two or more) buffer sets of a new case have this total size."""
    with mock.patch.dict(globals(), COLD_BYTES=nbytes):
        yield


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases of a table one at a time, because each case holds its buffers."""
    for numel in options.sizes:
        yield from _cases(numel, not options.no_peers, options)


def _cases(numel: int, with_peers: bool, options: argparse.Namespace) -> Iterator[Case]:
    device, ops, row_widths = options.device, options.ops, options.row_widths
    for density in options.density:
        if "mask_pack" in ops:
            for grad, values in ((F32, F32), (F32, BF16), (BF16, BF16)):
                yield mask_pack(device, numel, density, grad, values, with_peers=with_peers)
            yield mask_pack(device, numel, density, F32, BF16, ranges=RANGES)
        if "sample_threshold" in ops:
            yield sample_threshold(device, numel, density)
            yield sample_threshold(device, numel, density, ranges=RANGES)
        if "scatter_unpack" in ops:
            for ranks in (2, 8):
                yield scatter_unpack(device, numel, density, ranks)
    for format in QUANTIZED_CODES:
        if "quantize_pack" in ops:
            for grad in (F32, BF16):
                yield quantize_pack(device, numel, grad, format)
        if "dequantize_sum" in ops:
            for ranks in (2, 8):
                yield dequantize_sum(device, numel, format, ranks)
    for changed in CHANGED:
        if "diff_pack" in ops:
            yield diff_pack(device, numel, changed, with_peers=with_peers)
            yield diff_pack(device, numel, changed, checksums=True)
        if "patch_apply" in ops:
            yield patch_apply(device, numel, changed)
    # A quarter on the CPU, because malloc reuses blocks below 32 MiB. With larger blocks,
    # allocation of pages by the operating system would dominate the time.
    elements = numel if device == "cuda" else numel // 4
    for width in row_widths if numel >= max(row_widths) else ():
        rows = elements // width
        if "row_pack" in ops:
            yield row_pack(device, rows, width, 0.05, with_peers=with_peers)
            yield row_pack(device, rows, width, 0.05, BF16)
        if "row_unpack" in ops:
            for dtype in (F32, BF16):
                yield row_unpack(device, rows, width, 0.05, dtype)
        for op, make in (("row_quantize", row_quantize), ("row_dequantize", row_dequantize)):
            for format in FORMATS if op in ops else ():
                yield make(device, rows, width, format)
        for format in FORMATS if "row_dequantize_sum" in ops else ():
            for ranks in (2, 8):
                yield row_dequantize_sum(device, rows, width, format, ranks)


def first_look(device: str) -> Iterator[Case]:
    """Yield mask_pack, scatter_unpack and row_pack at one size. Exact top-k is the only peer."""
    numel = FIRST_LOOK_SIZES[device]
    with buffers_of(FIRST_LOOK_COLD_BYTES):
        packing = mask_pack(device, numel, 0.01, F32, F32, with_peers=True)
    packing.peers.pop(peers.CUB, None)
    yield packing
    with buffers_of(FIRST_LOOK_COLD_BYTES):
        yield scatter_unpack(device, numel, 0.01, 2)
        yield row_pack(device, numel // 256, 256, 0.05, with_peers=True)


def mask_pack(
    device: str,
    numel: int,
    density: float,
    grad_dtype: torch.dtype,
    value_dtype: torch.dtype,
    *,
    ranges: int = 1,
    clustered: bool = False,
    misaligned: bool = False,
    with_peers: bool = False,
) -> Case:
    """With `clustered`, packed entries fill whole rows. `misaligned` shifts tensors by one."""
    sets = _sets((8 + grad_dtype.itemsize) * numel)
    clean = _normal(sets, numel, device)
    grad = [t.to(grad_dtype) for t in _normal(sets, numel, device)]
    tau = _threshold(density, 2**0.5, device).repeat(ranges)
    if clustered:
        clean = [_in_rows(t, density) for t in clean]
        grad = [t.mul_(0.01) for t in grad]
        tau.fill_(1.0)
    residual = [_one_off(t) if misaligned else t.clone() for t in clean]
    if misaligned:
        grad = [_one_off(t) for t in grad]
    capacity = max(1, int(1.25 * density * range_bounds(numel, ranges, 0)[1]))
    nbytes = payload_layout(numel, capacity, value_dtype, ranges).nbytes
    payload = torch.zeros(sets, ranges, nbytes, dtype=torch.uint8, device=device)
    seen = torch.zeros(ranges, dtype=torch.int32, device=device)

    def run(ops, i):
        ops.mask_pack(residual[i], grad[i], tau, payload[i], seen, capacity, value_dtype)
        return residual[i], payload[i], seen

    moved = int((8 + grad_dtype.itemsize + (2 + value_dtype.itemsize) * density) * numel)
    others = {}
    if with_peers and grad_dtype == F32 and value_dtype == F32:
        others = peers.compaction(residual, grad, tau, density)
    detail = f"{_name(grad_dtype)} grad, {_name(value_dtype)} values{_in_ranges(ranges)}"
    detail += ", clustered" * clustered + ", misaligned" * misaligned
    return Case(
        *("mask_pack", detail, numel, moved, sets, run),
        reset=lambda i: residual[i].copy_(clean[i]),
        density=density,
        peers=others,
    )


def sample_threshold(
    device: str,
    numel: int,
    density: float,
    *,
    most: int = SAMPLES,
    ranges: int = 1,
    line: int | None = None,
) -> Case:
    """`line`: bytes of each tensor that must be read for a sample, by default those of `device`."""
    sets = _sets(8 * numel)
    grad, residual = _normal(sets, numel, device), _normal(sets, numel, device)
    line = line or (32 if device == "cuda" else 64)

    def run(ops, i):
        return (ops.sample_threshold(grad[i], residual[i], density, ranges, most, i),)

    bounds = [range_bounds(numel, ranges, r) for r in range(ranges)]
    samples = sum(min(high - low, most) for low, high in bounds)
    moved = 2 * min(line * samples, 4 * numel)
    detail = f"{samples} samples{_in_ranges(ranges)}"
    return Case("sample_threshold", detail, numel, moved, sets, run, density=density)


def scatter_unpack(device: str, numel: int, density: float, ranks: int) -> Case:
    capacity = max(1, int(1.25 * density * numel))
    nbytes = payload_layout(numel, capacity, BF16).nbytes
    sets = _sets(4 * numel + ranks * nbytes)
    pack = _best(device).mask_pack
    tau = _threshold(density, 1.0, device)
    residual = torch.zeros(numel, device=device)
    seen = torch.zeros(1, dtype=torch.int32, device=device)
    payloads = torch.zeros(sets, ranks, nbytes, dtype=torch.uint8, device=device)
    for payload in payloads.view(-1, nbytes):
        normal = torch.randn(numel, device=device)
        pack(residual.zero_(), normal, tau, payload, seen, capacity, BF16)
    out = [torch.zeros(numel, device=device) for _ in range(sets)]

    def run(ops, i):
        status = ops.scatter_unpack(payloads[i], out[i], capacity, BF16, 1 / ranks)
        return out[i], status

    moved = int(4 * numel + ranks * 4 * density * numel)
    return Case("scatter_unpack", f"P={ranks}", numel, moved, sets, run, density=density)


def quantize_pack(device: str, numel: int, grad_dtype: torch.dtype, format: str) -> Case:
    nbytes = quantized_payload_bytes(numel, format)
    moved = (8 + grad_dtype.itemsize) * numel + nbytes
    sets = _sets(moved)
    grad = [t.to(grad_dtype) for t in _normal(sets, numel, device)]
    residual = [torch.zeros(numel, device=device) for _ in range(sets)]
    payload = torch.zeros(sets, nbytes, dtype=torch.uint8, device=device)

    def run(ops, i):
        ops.quantize_pack(residual[i], grad[i], payload[i], format)
        return residual[i], payload[i]

    detail = f"{_name(grad_dtype)} grad, {format}"
    reset = lambda i: residual[i].zero_()  # noqa: E731
    return Case("quantize_pack", detail, numel, moved, sets, run, reset)


def dequantize_sum(
    device: str, numel: int, format: str, ranks: int, dtype: torch.dtype = F32
) -> Case:
    nbytes = quantized_payload_bytes(numel, format)
    moved = ranks * nbytes + dtype.itemsize * numel
    sets = _sets(moved)
    payloads = torch.zeros(sets, ranks, nbytes, dtype=torch.uint8, device=device)
    for payload in payloads.view(-1, nbytes):
        _best(device).quantize_pack(None, torch.randn(numel, device=device), payload, format)
    out = [torch.zeros(numel, dtype=dtype, device=device) for _ in range(sets)]

    def run(ops, i):
        status = ops.dequantize_sum(payloads[i], out[i], format, 1 / ranks)
        return out[i], status

    detail = f"P={ranks}, {format}{_dtype_suffix(dtype)}"
    return Case("dequantize_sum", detail, numel, moved, sets, run)


def diff_pack(
    device: str, numel: int, changed: float, checksums: bool = False, *, with_peers: bool = False
) -> Case:
    """Its bytes are those of a copy of one tensor of weights."""
    weights, snapshot, capacity = _weights(device, numel, changed)
    patch = torch.zeros(len(weights), patch_bytes(numel, capacity), dtype=torch.uint8)
    patch = patch.to(device)
    sums = torch.zeros(2, dtype=torch.int64, device=device)

    def run(ops, i):
        ops.diff_pack(weights[i], snapshot[i], patch[i], sums if checksums else None, capacity)
        return patch[i], sums

    others = peers.differences(weights, snapshot) if with_peers else {}
    detail = f"bfloat16, {'with' if checksums else 'without'} checksums"
    args = ("diff_pack", detail, numel, 4 * numel, len(weights), run)
    return Case(*args, density=changed, peers=others)


def patch_apply(device: str, numel: int, changed: float) -> Case:
    """Its bytes are those of a copy of the weights."""
    weights, snapshot, capacity = _weights(device, numel, changed)
    patch = torch.zeros(len(weights), patch_bytes(numel, capacity), dtype=torch.uint8)
    patch = patch.to(device)
    for new, old, to in zip(weights, snapshot, patch, strict=True):
        _best(device).diff_pack(new, old, to, None, capacity)
    target = [old.clone() for old in snapshot]

    def run(ops, i):
        return ops.patch_apply(patch[i], target[i]), target[i]

    def reset(i):
        target[i].copy_(snapshot[i])

    args = ("patch_apply", "bfloat16", numel, 4 * numel, len(weights), run, reset)
    return Case(*args, density=changed)


def _weights(device: str, numel: int, changed: float) -> tuple[list[Tensor], list[Tensor], int]:
    """Weights, their snapshots, and a sufficient capacity. Most changes are steps of 1 or -1."""
    sets = _sets(4 * numel)
    snapshot = [tensor.to(BF16) for tensor in _normal(sets, numel, device)]
    weights = []
    for old in snapshot:
        chance = torch.rand(numel, device=device)
        step = torch.where(chance < FULL_VALUES * changed, 100, 1) * (chance < changed)
        step = torch.where(old < 0, -step, step).to(torch.int16)
        weights.append((old.view(torch.int16) + step).view(BF16))
    return weights, snapshot, int(1.1 * changed * numel) + 1024


def row_pack(
    device: str,
    rows: int,
    width: int,
    density: float,
    dtype: torch.dtype = F32,
    *,
    with_peers: bool = False,
) -> Case:
    k, moved = _kept(width, density, dtype)
    x = _rows(device, rows, width, dtype, rows * moved)
    case = _of_rows(
        "row_pack", x, f"k={k}", dtype, moved, lambda ops, i: ops.row_pack(x[i], k, dtype), density
    )
    case.peers = peers.row_selection(x, k) if with_peers else {}
    return case


def row_gather(device: str, rows: int, width: int, density: float) -> Case:
    k, _ = _kept(width, density, F32)
    # The sectors of x that contain any of k random columns, the values and the positions
    moved = 4 * width * (1 - (1 - k / width) ** 8) + 4 * k + position_bytes(width, k)
    x = _rows(device, rows, width, F32, rows * moved)
    positions = [_best(device).row_pack(each, k, F32)[1] for each in x]

    def run(ops, i):
        return (ops.row_gather(x[i], positions[i], k, F32),)

    return _of_rows("row_gather", x, f"k={k}", F32, moved, run, density)


def row_unpack(
    device: str, rows: int, width: int, density: float, dtype: torch.dtype = F32
) -> Case:
    k, moved = _kept(width, density, dtype)
    x = _rows(device, rows, width, F32, rows * moved)
    packed = [_best(device).row_pack(each, k, dtype) for each in x]

    def run(ops, i):
        return (ops.row_unpack(*packed[i], width, dtype),)

    return _of_rows("row_unpack", x, f"k={k}", dtype, moved, run, density)


def row_quantize(device: str, rows: int, width: int, format: str, dtype: torch.dtype = F32) -> Case:
    moved = dtype.itemsize * width + row_bytes(width, format)
    x = _rows(device, rows, width, dtype, rows * moved)

    def run(ops, i):
        return (ops.row_quantize(x[i], format),)

    return _of_rows("row_quantize", x, format, dtype, moved, run)


def row_dequantize(
    device: str, rows: int, width: int, format: str, dtype: torch.dtype = F32
) -> Case:
    moved = dtype.itemsize * width + row_bytes(width, format)
    x = _rows(device, rows, width, F32, rows * moved)
    quantized = [_best(device).row_quantize(each, format) for each in x]

    def run(ops, i):
        return (ops.row_dequantize(quantized[i], width, format, dtype),)

    return _of_rows("row_dequantize", x, format, dtype, moved, run)


def row_dequantize_sum(
    device: str, rows: int, width: int, format: str, ranks: int, dtype: torch.dtype = F32
) -> Case:
    moved = dtype.itemsize * width + ranks * row_bytes(width, format)
    x = _rows(device, rows, width, F32, rows * moved)
    sent = [_best(device).row_quantize(each, format) for each in x]
    quantized = [torch.stack([each.roll(rank, 0) for rank in range(ranks)]) for each in sent]

    def run(ops, i):
        return (ops.row_dequantize_sum(quantized[i], width, format, dtype),)

    return _of_rows("row_dequantize_sum", x, f"{format}, P={ranks}", dtype, moved, run)


def _kept(width: int, density: float, dtype: torch.dtype) -> tuple[int, int]:
    """The entries that are kept per row, and the bytes that must move per row."""
    k = max(1, math.ceil(density * width))
    return k, dtype.itemsize * (width + k) + position_bytes(width, k)


def _rows(device: str, rows: int, width: int, dtype: torch.dtype, moved: float) -> list[Tensor]:
    """Buffer sets of rows of normally distributed numbers."""
    normal = _normal(_sets(moved), rows * width, device)
    return [tensor.to(dtype).view(rows, width) for tensor in normal]


def _of_rows(
    op: str,
    x: list[Tensor],
    how: str,
    dtype: torch.dtype,
    moved: float,
    run: Callable[[SimpleNamespace, int], tuple[Tensor, ...]],
    density: float | None = None,
) -> Case:
    """A row op's case. `moved`: bytes that must move per row."""
    rows, width = x[0].shape
    detail = f"[B, {width}], {how}{_dtype_suffix(dtype)}"
    nbytes = int(rows * moved)
    return Case(*(op, detail, rows * width, nbytes, len(x), run), allocates=True, density=density)


def backends(device: str) -> dict[str, SimpleNamespace]:
    """{name: ops} of the backends for this device, eager first.

    On the CPU, Triton is omitted, because its interpreter is only for tests.
    """
    found = testing.backends()
    timed = found.keys() - ({"triton"} if device == "cpu" else set())
    usable = {name: ops for name, ops in found.items() if name in timed and ops.device == device}
    return {"eager": found["eager"], **usable}


def _best(device: str) -> SimpleNamespace:
    return list(backends(device).values())[1 if len(backends(device)) > 1 else 0]


def _sets(nbytes: float) -> int:
    return min(max(math.ceil(COLD_BYTES / max(nbytes, 1)), 2), MOST_SETS)


def _normal(sets: int, numel: int, device: str) -> list[Tensor]:
    return [torch.randn(numel, device=device) for _ in range(sets)]


def _in_rows(tensor: Tensor, density: float) -> Tensor:
    """Scale entries to near zero, except in a fraction `density` of rows with magnitudes >= 2."""
    rows = tensor.view(-1, CLUSTER)
    kept = torch.rand(len(rows), 1, device=tensor.device) < density
    return torch.where(kept, rows + 2 * rows.sign(), 0.01 * rows).flatten()


def _one_off(tensor: Tensor) -> Tensor:
    """A copy that starts one element after an aligned address."""
    return tensor.new_empty(tensor.numel() + 1)[1:].copy_(tensor)


def _dtype_suffix(dtype: torch.dtype) -> str:
    return "" if dtype == F32 else f", {_name(dtype)}"


def _in_ranges(count: int) -> str:
    return f", {count} ranges" if count > 1 else ""


def _threshold(density: float, deviation: float, device: str) -> Tensor:
    """The threshold that a fraction `density` of normal numbers exceeds in magnitude."""
    normal = torch.distributions.Normal(0, deviation)
    return normal.icdf(torch.tensor([1 - density / 2])).to(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
