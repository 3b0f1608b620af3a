"""Tensors of more than 2^31 elements.

Every op once, on numbers everywhere: bfloat16, and float32 residuals. Sampled elements and rows,
and all beyond 2^31 where it can be worked out, equal the oracle's; sums are conserved.

Needs 10 GB at most. With a residual and a gradient, mask_pack needs 13: it is run so among zeros,
which take no memory, by tests/conformance/test_large.py.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import floats, payload, quantized_payload, quantized_rows, rows, thresholds

from dct_kernels import testing
from dlrm.errors import UsageError

NUMEL = 2**31 + 2**22 + 16385
BEYOND = 2**31
PERIOD = 1_000_003  # a prime: no wrong index of a power of two finds the same numbers
ROWS, WIDTH = 2**20 + 4099, 2**11 - 1
FORMAT = "int4"


def run(door: str, first: int, count: int, seed: int) -> dict[str, Any]:
    """A case for every op; its data follow from the seed."""
    check, each = CASES[door]
    needed = 1.1 * each * NUMEL / 10**9
    available = int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) / 1e6
    if available < needed:
        raise UsageError(f"{door} must have {needed:.1f} GB, only {available:.1f} are free")
    failures = []
    for case in range(first, first + count):
        try:
            check(testing.backends()["cpp"], _Data(seed + case))
        except AssertionError as error:
            failures.append({"case": case, "what": str(error) or "differs"})
    return {"failures": failures, "elements": count * NUMEL}


class _Data:
    """Eighths, so that sums are exact; `seed` chooses them."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.base = (torch.randn(PERIOD, generator=generator) * 8).round() / 8

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> torch.Tensor:
        x = torch.empty(shape or (NUMEL,), dtype=dtype)
        flat = x.view(-1)
        whole = flat.numel() // PERIOD * PERIOD
        flat[:whole].view(-1, PERIOD).copy_(self.base)
        flat[whole:] = self.base[: flat.numel() - whole]
        return x

    def at(self, low: int, high: int) -> np.ndarray:
        return self.base.numpy()[np.arange(low, high) % PERIOD]

    def sum(self, of: torch.Tensor) -> float:
        """Of what `of` makes of one period: over all elements."""
        return float(of.double().sum()) * (NUMEL // PERIOD) + float(
            of[: NUMEL % PERIOD].double().sum()
        )


def _windows(length: int) -> list[tuple[int, int]]:
    """[low, high) of pieces that begin at multiples of so many elements."""
    places = [0, BEYOND // 2 // length, BEYOND // length - 1, BEYOND // length, NUMEL // length - 1]
    return [(p * length, min((p + 2) * length, NUMEL)) for p in places]


def _total(x: torch.Tensor) -> float:
    """The sum in float64, which torch would first make a copy of `x` for."""
    return sum(float(part.double().sum()) for part in x.view(-1).split(2**24))


def _require(right: bool, what: str) -> None:
    assert right, what


def _sample_threshold(ops, data: _Data) -> None:
    x, whole = data.tensor(torch.bfloat16), torch.tensor([0, NUMEL])
    found = ops.sample_threshold(x, None, whole, 0.01, 65536, 3)
    picks = thresholds.picks(NUMEL, 65536, 3, 0)
    _require(max(picks) > BEYOND, "no pick is beyond 2^31")
    magnitudes = np.sort(np.abs(data.base.numpy()[np.array(picks) % PERIOD]))
    _require(found.item() == magnitudes[-thresholds.rank(0.01, 65536)], "the threshold differs")


THRESHOLD, CAPACITY = 3.25, 4_000_000


def _packed(ops, data: _Data) -> tuple[torch.Tensor, torch.Tensor, payload.Geometry]:
    geometry = payload.Geometry(NUMEL, CAPACITY, "float32")
    residual, segments = data.tensor(torch.float32), torch.tensor([0, BEYOND, NUMEL])
    packed, seen = torch.zeros(geometry.nbytes, dtype=torch.uint8), torch.empty(2).int()
    limits = torch.full((2,), THRESHOLD)
    ops.mask_pack(residual, None, segments, limits, packed, seen, CAPACITY, torch.float32)
    passed = data.base.abs() >= THRESHOLD
    _require(seen.sum().item() == data.sum(passed), "seen differs")
    return residual, packed, geometry


def _mask_pack(ops, data: _Data) -> None:
    residual, packed, geometry = _packed(ops, data)
    content = payload.read(packed.numpy().tobytes(), geometry, 0)
    _require((content.numel, content.flags) == (NUMEL, 0), "the header differs")
    _require(content.count == data.sum(data.base.abs() >= THRESHOLD), "the count differs")
    values = floats.widen(np.array(content.values), "float32")
    kept = data.sum(torch.where(data.base.abs() < THRESHOLD, data.base, 0))
    _require(float(values.sum(dtype=np.float64)) == data.sum(data.base) - kept, "sent differs")
    _require(_total(residual) == kept, "what is left differs")
    for block, (low, high) in ((w[0] // payload.BLOCK, w) for w in _windows(payload.BLOCK)):
        x = data.at(low, high)
        passed = np.abs(x) >= THRESHOLD
        first, last = content.starts[block], content.starts[-(-high // payload.BLOCK)]
        _require(np.array_equal(values[first:last], x[passed]), f"values at {low}")
        where = low % payload.BLOCK + np.flatnonzero(passed)
        found = np.array(content.positions[first:last])
        _require(np.array_equal(found, where % payload.BLOCK), f"positions at {low}")
    x = data.at(BEYOND, NUMEL)
    left = np.where(np.abs(x) >= THRESHOLD, 0, x)
    _require(np.array_equal(residual[BEYOND:].numpy(), left), "the residual beyond 2^31")


def _scatter_unpack(ops, data: _Data) -> None:
    residual, packed, _ = _packed(ops, data)
    del residual
    out = torch.empty(NUMEL, dtype=torch.bfloat16)
    status = ops.scatter_unpack(packed.unsqueeze(0), out, CAPACITY, torch.float32, 2.0)
    _require(status.tolist() == [0], "the status")
    sent = torch.where(data.base.abs() >= THRESHOLD, data.base, 0)
    _require(_total(out) == 2 * data.sum(sent), "the sum differs")
    expected = 2 * sent.numpy()[np.arange(BEYOND, NUMEL) % PERIOD]
    _require(np.array_equal(out[BEYOND:].float().numpy(), expected), "beyond 2^31")


def _rows_of(raw: torch.Tensor, low: int, high: int, format: str) -> bytes:
    size, row = quantized_payload.ROW_BYTES[format], quantized_payload.ROW
    return raw[64 + low // row * size : 64 + -(-high // row) * size].numpy().tobytes()


def _require_rows(raw: torch.Tensor, x_at, format: str) -> None:
    """Sampled rows of a payload are what the oracle makes of x_at(low, high)."""
    _require(raw[:64].numpy().tobytes() == quantized_payload.header(NUMEL, format), "the header")
    for low, high in _windows(quantized_payload.ROW):
        body, _, _ = quantized_payload.encode(x_at(low, high), format)
        _require(_rows_of(raw, low, high, format) == body, f"rows at {low}")


def _quantize_pack(ops, data: _Data) -> None:
    residual = data.tensor(torch.float32)
    raw = torch.zeros(quantized_payload.Geometry(NUMEL, FORMAT).nbytes, dtype=torch.uint8)
    ops.quantize_pack(residual, None, raw, FORMAT)
    _require_rows(raw, data.at, FORMAT)
    sent = quantized_payload.decode(_rows_of(raw, BEYOND, NUMEL, FORMAT), NUMEL - BEYOND, FORMAT)
    total = sent.astype(np.float64) + residual[BEYOND:].numpy()
    _require(np.array_equal(total, data.at(BEYOND, NUMEL)), "sent + residual beyond 2^31")


def _quantized(ops, data: _Data, format: str) -> torch.Tensor:
    raw = torch.zeros(quantized_payload.Geometry(NUMEL, format).nbytes, dtype=torch.uint8)
    ops.quantize_pack(None, data.tensor(torch.bfloat16), raw, format)
    return raw


def _dequantize_sum(ops, data: _Data) -> None:
    raw = _quantized(ops, data, FORMAT)
    _require_rows(raw, data.at, FORMAT)
    out = torch.empty(NUMEL, dtype=torch.bfloat16)
    _require(ops.dequantize_sum(raw.unsqueeze(0), out, FORMAT, 0.5).tolist() == [0], "the status")
    for low, high in [*_windows(quantized_payload.ROW), (BEYOND, NUMEL)]:
        sent = quantized_payload.decode(_rows_of(raw, low, high, FORMAT), high - low, FORMAT)
        expected = torch.from_numpy(0.5 * sent).bfloat16()
        _require(torch.equal(out[low:high], expected), f"at {low}")


def _dequantize_sum_pack(ops, data: _Data) -> None:
    raw = _quantized(ops, data, "ternary")
    residual, packed = data.tensor(torch.float32), torch.zeros_like(raw)
    status = ops.dequantize_sum_pack(raw.unsqueeze(0), residual, packed, "ternary", 0.5)
    _require(status.tolist() == [0], "the status")

    def acc(low: int, high: int) -> np.ndarray:
        sent = quantized_payload.decode(_rows_of(raw, low, high, "ternary"), high - low, "ternary")
        return data.at(low, high) + np.float32(0.5) * sent

    _require_rows(packed, acc, "ternary")
    for low, high in _windows(quantized_payload.ROW):
        _, sent, _ = quantized_payload.encode(acc(low, high), "ternary")
        left = acc(low, high) - sent
        _require(np.array_equal(residual[low:high].numpy(), left), f"the residual at {low}")


SAMPLED = [0, 1, 2**19, BEYOND // WIDTH, BEYOND // WIDTH + 1, ROWS - 2, ROWS - 1]


def _sampled_rows(data: _Data) -> np.ndarray:
    return np.stack([data.at(row * WIDTH, (row + 1) * WIDTH) for row in SAMPLED])


def _packed_rows(ops, data: _Data) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = data.tensor(torch.bfloat16, (ROWS, WIDTH))
    return x, *ops.row_pack(x, 16, torch.bfloat16)


def _row_pack(ops, data: _Data) -> None:
    _, values, positions = _packed_rows(ops, data)
    raw, where = rows.row_pack(_sampled_rows(data), 16, "bfloat16")
    found = values[SAMPLED].view(torch.int16).numpy().view(np.uint16)
    _require(np.array_equal(found, raw), "values")
    _require(np.array_equal(positions[SAMPLED].numpy(), where), "positions")


def _row_gather(ops, data: _Data) -> None:
    x, values, positions = _packed_rows(ops, data)
    gathered = ops.row_gather(x, positions, 16, torch.bfloat16)
    _require(torch.equal(gathered, values), "what is gathered is not what was packed")


def _row_unpack(ops, data: _Data) -> None:
    x, values, positions = _packed_rows(ops, data)
    del x
    out = ops.row_unpack(values, positions, WIDTH, torch.bfloat16)
    raw, where = rows.row_pack(_sampled_rows(data), 16, "float32")
    expected = floats.widen(
        rows.row_unpack(floats.widen(raw, "float32"), where, WIDTH, "float32"), "float32"
    )
    _require(np.array_equal(out[SAMPLED].float().numpy(), expected), "sampled rows")
    _require(_total(out) == _total(values), "the sum differs")


def _row_quantize(ops, data: _Data) -> None:
    found = ops.row_quantize(data.tensor(torch.bfloat16, (ROWS, WIDTH)), "int8")
    expected = quantized_rows.row_quantize(_sampled_rows(data), "int8")
    _require(np.array_equal(found[SAMPLED].numpy(), expected), "sampled rows")


def _row_dequantize(ops, data: _Data) -> None:
    size = quantized_rows.row_bytes(WIDTH, "int8")
    raw = torch.empty(ROWS, size, dtype=torch.uint8)
    for begin in range(0, ROWS, 2**16):  # any bytes are rows
        part = raw[begin : begin + 2**16]
        low = begin * size
        part.view(-1).copy_(
            torch.from_numpy((data.at(low, low + part.numel()) * 8).astype(np.int8))
        )
    out = ops.row_dequantize(raw, WIDTH, "int8", torch.bfloat16)
    bits = quantized_rows.row_dequantize(raw[SAMPLED].numpy(), WIDTH, "int8", "bfloat16")
    found = out[SAMPLED].view(torch.int16).numpy().view(np.uint16)
    _require(np.array_equal(found, bits), "sampled rows")


# {op: (what checks it, bytes that it needs for an element)}
CASES = {
    "sample_threshold": (_sample_threshold, 2),
    "mask_pack": (_mask_pack, 4.1),
    "scatter_unpack": (_scatter_unpack, 4.1),
    "quantize_pack": (_quantize_pack, 4.6),
    "dequantize_sum": (_dequantize_sum, 2.6),
    "dequantize_sum_pack": (_dequantize_sum_pack, 4.5),
    "row_pack": (_row_pack, 2.1),
    "row_gather": (_row_gather, 2.1),
    "row_unpack": (_row_unpack, 2.1),
    "row_quantize": (_row_quantize, 3.1),
    "row_dequantize": (_row_dequantize, 3.1),
}
COUNTS = dict.fromkeys(CASES, 1)
BATCH = 1
QUICK = ()
