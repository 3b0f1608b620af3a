"""The calls whose instructions and memory sectors are counted.

bench/kernels.py and bench/gpu/check.py time these calls with more elements.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from dct_kernels import payload_layout, quantized_payload_bytes, reference
from dct_kernels.layout import QUANTIZED_CODES, ROW, quantized_row_bytes
from dct_kernels.row_layout import FORMATS, position_bytes, row_bytes

from .backend import executor

F32, BF16 = torch.float32, torch.bfloat16
NUMEL, LARGEST = 2**17, 2**28  # elements of counted calls, and of the largest timed calls
ROW_NUMEL = 2**16


@dataclass(frozen=True)
class Case:
    """A counted call, `run(ops)`."""

    op: str
    detail: str  # as in bench/kernels.py
    elements: int  # costs are reported per element
    bytes: float  # that must move, per element
    run: Callable[[SimpleNamespace], object]
    density: float | None = None


@dataclass(frozen=True)
class Maker:
    """Creates a case, always with the same random numbers."""

    function: Callable[..., Case]
    arguments: tuple

    @property
    def op(self) -> str:
        return self.function.__name__

    def __str__(self) -> str:
        return " ".join([self.op, *(str(a).removeprefix("torch.") for a in self.arguments)])

    def __call__(self) -> Case:
        torch.manual_seed(0)
        return self.function(*self.arguments)


def mask_pack(density: float, grad_dtype: torch.dtype, value_dtype: torch.dtype) -> Case:
    residual, grad = torch.randn(NUMEL), torch.randn(NUMEL).to(grad_dtype)
    threshold, capacity = _threshold(density, 2**0.5), max(1, int(1.25 * density * NUMEL))
    payload = torch.zeros(payload_layout(NUMEL, capacity, value_dtype).nbytes, dtype=torch.uint8)
    seen = torch.zeros(1, dtype=torch.int32)

    def run(ops):
        with _tile_as_for_large():
            tensors = (residual.clone(), grad, threshold, payload, seen)
            ops.mask_pack(*tensors, capacity, value_dtype)

    moved = 8 + grad_dtype.itemsize + (2 + value_dtype.itemsize) * density
    detail = f"{_name(grad_dtype)} grad, {_name(value_dtype)} values"
    return Case("mask_pack", detail, NUMEL, moved, run, density)


def sample_threshold(samples: int) -> Case:
    """Costs are per sample."""
    numel = 32 * samples  # so that no two samples are in the same sector
    grad, residual = torch.randn(numel), torch.randn(numel)

    def run(ops):
        ops.sample_threshold(grad, residual, 0.01, max_samples=samples)

    return Case("sample_threshold", f"{samples} samples", samples, 64, run, 0.01)


def scatter_unpack(density: float, ranks: int) -> Case:
    capacity = max(1, int(1.25 * density * NUMEL))
    nbytes = payload_layout(NUMEL, capacity, BF16).nbytes
    payloads = torch.zeros(ranks, nbytes, dtype=torch.uint8)
    seen, threshold = torch.zeros(1, dtype=torch.int32), _threshold(density, 1.0)
    for payload in payloads:
        tensors = torch.randn(NUMEL), torch.zeros(NUMEL), threshold, payload, seen
        reference.mask_pack(*tensors, capacity, BF16)
    out = torch.zeros(NUMEL)

    def run(ops):
        with _tile_as_for_large():
            ops.scatter_unpack(payloads, out, capacity, BF16, 1 / ranks)

    moved = 4 + ranks * 4 * density
    return Case("scatter_unpack", f"P={ranks}", NUMEL, moved, run, density)


def quantize_pack(format: str, grad_dtype: torch.dtype) -> Case:
    residual, grad = torch.randn(NUMEL), torch.randn(NUMEL).to(grad_dtype)
    payload = torch.zeros(quantized_payload_bytes(NUMEL, format), dtype=torch.uint8)

    def run(ops):
        ops.quantize_pack(residual.clone(), grad, payload, format)

    moved = 8 + grad_dtype.itemsize + _entry_bytes(format)
    return Case("quantize_pack", f"{format}, {_name(grad_dtype)} grad", NUMEL, moved, run)


def dequantize_sum(format: str, ranks: int, dtype: torch.dtype) -> Case:
    payloads, out = _quantized(format, ranks), torch.zeros(NUMEL, dtype=dtype)

    def run(ops):
        with _tile_as_for_large():
            ops.dequantize_sum(payloads, out, format, 1 / ranks)

    moved = ranks * _entry_bytes(format) + dtype.itemsize
    return Case("dequantize_sum", f"{format}, P={ranks}, {_name(dtype)} out", NUMEL, moved, run)


@contextlib.contextmanager
def _tile_as_for_large() -> Iterator[None]:
    executor().tile_as_for(LARGEST // NUMEL)
    try:
        yield
    finally:
        executor().tile_as_for(1)


def _quantized(format: str, ranks: int) -> torch.Tensor:
    """One payload per rank."""
    nbytes = quantized_payload_bytes(NUMEL, format)
    payloads = torch.zeros(ranks, nbytes, dtype=torch.uint8)
    for payload in payloads:
        reference.quantize_pack(None, torch.randn(NUMEL), payload, format)
    return payloads


def _entry_bytes(format: str) -> float:
    """Bytes per entry of a payload in this format."""
    return quantized_row_bytes(format) / ROW


def row_pack(width: int, dtype: torch.dtype) -> Case:
    x, k = _rows(width).to(dtype), math.ceil(width / 20)
    moved = dtype.itemsize * (width + k) + position_bytes(width, k)
    return _of_rows("row_pack", width, f"k={k}", dtype, moved, lambda op: op(x, k, dtype))


def row_gather(width: int) -> Case:
    x, k = _rows(width), math.ceil(width / 20)
    _, positions = reference.row_pack(x, k, F32)
    moved = 4 * width * (1 - (1 - k / width) ** 8) + 4 * k + position_bytes(width, k)  # sectors
    return _of_rows("row_gather", width, f"k={k}", F32, moved, lambda op: op(x, positions, k, F32))


def row_unpack(width: int) -> Case:
    k = math.ceil(width / 20)
    packed = reference.row_pack(_rows(width), k, F32)
    moved = 4 * (width + k) + position_bytes(width, k)
    return _of_rows("row_unpack", width, f"k={k}", F32, moved, lambda op: op(*packed, width, F32))


def row_quantize(width: int, format: str, dtype: torch.dtype) -> Case:
    x = _rows(width).to(dtype)
    moved = dtype.itemsize * width + row_bytes(width, format)
    return _of_rows("row_quantize", width, format, dtype, moved, lambda op: op(x, format))


def row_dequantize(width: int, format: str, dtype: torch.dtype) -> Case:
    rows = reference.row_quantize(_rows(width), format)
    moved = dtype.itemsize * width + row_bytes(width, format)
    arguments = rows, width, format, dtype
    return _of_rows("row_dequantize", width, format, dtype, moved, lambda op: op(*arguments))


def row_dequantize_sum(width: int, format: str, ranks: int, dtype: torch.dtype) -> Case:
    rows = torch.stack([reference.row_quantize(_rows(width), format) for _ in range(ranks)])
    moved = dtype.itemsize * width + ranks * row_bytes(width, format)
    how, arguments = f"{format}, P={ranks}", (rows, width, format, dtype)
    return _of_rows("row_dequantize_sum", width, how, dtype, moved, lambda op: op(*arguments))


def _rows(width: int) -> torch.Tensor:
    return torch.randn(ROW_NUMEL // width, width)


def _of_rows(op: str, width: int, how: str, dtype: torch.dtype, moved: float, call) -> Case:
    """A row op's case. `moved`: bytes that must move per row. `call`: a function of the op."""
    detail = f"[B, {width}], {how}" + (", bfloat16" if dtype == BF16 else "")
    return Case(op, detail, ROW_NUMEL, moved / width, lambda ops: call(getattr(ops, op)))


def _threshold(density: float, deviation: float) -> torch.Tensor:
    """The threshold that a fraction `density` of normal numbers exceeds in magnitude."""
    return torch.distributions.Normal(0, deviation).icdf(torch.tensor([1 - density / 2]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_GRADIENTS = ((F32, F32), (F32, BF16), (BF16, BF16))
CASES = [
    Maker(function, tuple(arguments))
    for function, *arguments in (
        *((mask_pack, density, *dtypes) for density in (0.01, 0.001) for dtypes in _GRADIENTS),
        *((sample_threshold, picks) for picks in (4096, 8192, 16384, 65536)),
        *((scatter_unpack, 0.01, ranks) for ranks in (2, 8, 64)),
        (scatter_unpack, 0.001, 8),
        *((quantize_pack, format, F32) for format in QUANTIZED_CODES),
        (quantize_pack, "int4", BF16),
        *((dequantize_sum, format, p, F32) for format in QUANTIZED_CODES for p in (2, 8)),
        *((dequantize_sum, "int4", *of) for of in ((64, F32), (2, BF16))),
        *((row_pack, d, dtype) for dtype in (F32, BF16) for d in (64, 128, 256, 512, 1024, 4096)),
        *((row_gather, d) for d in (64, 256, 1024)),
        *((row_unpack, d) for d in (64, 128, 256, 512, 1024, 4096)),
        *(
            (op, d, format, F32)
            for op in (row_quantize, row_dequantize)
            for format in FORMATS
            for d in (64, 256, 1024)
        ),
        *((op, 256, "int4", BF16) for op in (row_quantize, row_dequantize)),
        *((row_dequantize_sum, 64, format, p, F32) for format in FORMATS for p in (2, 8)),
        *((row_dequantize_sum, d, "int4", 4, F32) for d in (256, 1024)),
        (row_dequantize_sum, 256, "int4", 4, BF16),
    )
]
OPS = list(dict.fromkeys(make.op for make in CASES))
