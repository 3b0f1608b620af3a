"""Calls whose kernels are compiled. They cover every kernel and dtype, but not every pair.

Importing this file does not need Triton, because a call receives the backend as its argument.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

import dct_kernels
from dct_kernels import layout
from dct_kernels.row_layout import FORMATS, position_bytes, row_bytes

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NUMEL, CAPACITY, RANGES, RANKS = 2**20, 8192, 8, 4
ROWS = 4096
MAIN = {  # {encoding of the positions: (width, k)}
    "bitmap": (1024, 128),
    "uint8": (256, 16),
}
MORE = {  # compiled for one pair of dtypes
    "bitmap of short rows": (64, 8),
    "bitmap of wide rows": (16384, 2048),
    "one column": (1, 1),
    "uint16": (1024, 16),
    "uint16 of wide rows": (16384, 256),
}
SHAPES = MAIN | MORE


@dataclass(frozen=True)
class Case:
    """A call, and the counts of its kernels that must be positive (some) or zero (none)."""

    name: str
    call: Callable[[ModuleType], object]
    some: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    dividing: tuple[str, ...] = ()  # architectures whose division uses multiply-adds


def mask_pack_case(grad_dtype: torch.dtype, value_dtype: torch.dtype) -> Case:
    def call(ops):
        residual, grad = torch.empty(NUMEL), torch.empty(NUMEL, dtype=grad_dtype)
        nbytes = dct_kernels.payload_layout(NUMEL, CAPACITY, value_dtype, RANGES).nbytes
        payload = torch.empty(RANGES, nbytes, dtype=torch.uint8)
        threshold, seen = torch.empty(RANGES), torch.empty(RANGES, dtype=torch.int32)
        ops.mask_pack(
            residual, grad, threshold, payload, seen, CAPACITY, value_dtype, torch.empty(1)
        )

    label = f"mask_pack, gradient {_name(grad_dtype)}, values {_name(value_dtype)}"
    return Case(label, call, some=("wide_loads", "wide_stores"))


def scatter_unpack_case(value_dtype: torch.dtype, out_dtype: torch.dtype) -> Case:
    def call(ops):
        nbytes = dct_kernels.payload_layout(NUMEL, CAPACITY, value_dtype).nbytes
        payloads = torch.empty(RANKS, nbytes, dtype=torch.uint8)
        out, out_scale = torch.empty(NUMEL, dtype=out_dtype), torch.empty(1)
        ops.scatter_unpack(payloads, out, CAPACITY, value_dtype, 1 / RANKS, out_scale)

    label = f"scatter_unpack, values {_name(value_dtype)}, out {_name(out_dtype)}"
    return Case(label, call, some=("wide_stores",))


def sample_threshold_case(grad_dtype: torch.dtype) -> Case:
    def call(ops):
        grad, residual = torch.empty(NUMEL, dtype=grad_dtype), torch.empty(NUMEL)
        ops.sample_threshold(grad, residual, 0.01, RANGES, inv_scale=torch.empty(1))

    label = f"sample_threshold, gradient {_name(grad_dtype)}"
    return Case(label, call, dividing=("gfx942",))  # divides integers


def quantized_cases(format: str, dtype: torch.dtype) -> list[Case]:
    """Calls of the ops on dense payloads. The gradient and the sum have `dtype`."""
    nbytes = dct_kernels.quantized_payload_bytes(NUMEL, format)

    def quantize(ops):
        grad, payload = torch.empty(NUMEL, dtype=dtype), torch.empty(nbytes, dtype=torch.uint8)
        ops.quantize_pack(torch.empty(NUMEL), grad, payload, format, torch.empty(1))

    def dequantize(ops):
        payloads = torch.empty(RANKS, nbytes, dtype=torch.uint8)
        out = torch.empty(NUMEL, dtype=dtype)
        ops.dequantize_sum(payloads, out, format, 1 / RANKS, torch.empty(1))

    label = f"{format}, {_name(dtype)}"
    some = ("wide_loads", "wide_stores")  # of float32 entries; accesses to codes may be narrower
    dividing = () if format in layout.UNSCALED else ARCHITECTURES
    return [
        Case(f"quantize_pack, {label}", quantize, some, dividing=dividing),
        Case(f"dequantize_sum, {label}", dequantize, ("wide_stores",)),
    ]


def patch_cases(weights_dtype: torch.dtype, dtype: torch.dtype) -> list[Case]:
    """Calls of the ops on weight patches. The snapshot has `dtype`."""

    def pack(ops):
        weights, snapshot = torch.empty(NUMEL, dtype=weights_dtype), torch.empty(NUMEL, dtype=dtype)
        checksums = torch.empty(2, dtype=torch.int64)
        ops.diff_pack(weights, snapshot, patch(), checksums, CAPACITY)

    def patch():
        return torch.empty(dct_kernels.patch_bytes(NUMEL, CAPACITY), dtype=torch.uint8)

    label = f"{_name(weights_dtype)} to {_name(dtype)}"
    return [
        Case(f"diff_pack, {label}", pack, some=("wide_loads",)),
        Case(f"patch_check, {label}", lambda ops: ops.patch_check(patch(), NUMEL, dtype)),
        Case(
            f"patch_apply, {label}",
            lambda ops: ops.patch_apply(patch(), torch.empty(NUMEL, dtype=dtype)),
        ),
        Case(f"checksum, {label}", lambda ops: ops.checksum(torch.empty(NUMEL, dtype=dtype))),
    ]


def row_cases(shape: str, x_dtype: torch.dtype, value_dtype: torch.dtype) -> list[Case]:
    width, k = SHAPES[shape]
    label = f"{shape}, {_name(x_dtype)} to {_name(value_dtype)}"

    def x(columns):
        return torch.empty(ROWS, columns, dtype=x_dtype)

    def positions():
        return torch.empty(ROWS, position_bytes(width, k), dtype=torch.uint8)

    wide_loads = {"some": ("wide_loads",), "none": ("narrow_loads",)}
    wide_stores = {"some": ("wide_stores",), "none": ("narrow_stores",)}
    bitmap = shape.startswith("bitmap")
    if not bitmap:  # gathers and scatters access few elements, one by one
        wide_stores = {"some": ("wide_stores",)}
    if shape == "one column":
        wide_loads = wide_stores = {}
    return [
        Case(
            f"row_pack, {label}", lambda ops: ops.row_pack(x(width), k, value_dtype), **wide_loads
        ),
        Case(
            f"row_gather, {label}",
            lambda ops: ops.row_gather(x(width), positions(), k, value_dtype),
            **(wide_loads if bitmap else {}),
        ),
        Case(
            f"row_unpack, {label}",
            lambda ops: ops.row_unpack(x(k), positions(), width, value_dtype),
            **wide_stores,
        ),
    ]


def quantized_row_cases(format: str, width: int, dtype: torch.dtype) -> list[Case]:
    label = f"{format}, {width} columns, {_name(dtype)}"

    def quantize(ops):
        ops.row_quantize(torch.empty(ROWS, width, dtype=dtype), format)

    def dequantize(ops):
        rows = torch.empty(ROWS, row_bytes(width, format), dtype=torch.uint8)
        ops.row_dequantize(rows, width, format, dtype)

    def dequantize_sum(ops):
        rows = torch.empty(2, ROWS, row_bytes(width, format), dtype=torch.uint8)
        ops.row_dequantize_sum(rows, width, format, dtype)

    return [
        Case(f"row_quantize, {label}", quantize, some=("wide_loads",), dividing=ARCHITECTURES),
        Case(f"row_dequantize, {label}", dequantize, ("wide_stores",), ("narrow_stores",)),
        Case(f"row_dequantize_sum, {label}", dequantize_sum, ("wide_stores",), ("narrow_stores",)),
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PAIRS = [(F32, BF16), (F16, F16), (BF16, BF16), (F32, F32)]
_CASES = [
    *(sample_threshold_case(dtype) for dtype in (F32, BF16, F16)),
    *(mask_pack_case(*pair) for pair in [(F32, F32), (BF16, BF16), (F16, F32)]),
    *(scatter_unpack_case(*pair) for pair in [(F32, F32), (BF16, BF16), (BF16, F16)]),
    *(case for name in layout.QUANTIZED_CODES for case in quantized_cases(name, F32)),
    *(case for name in ("int4", "ternary") for case in quantized_cases(name, BF16)),
    *(case for pair in ((F32, F16), (BF16, BF16)) for case in patch_cases(*pair)),
    *(case for shape in MAIN for pair in PAIRS for case in row_cases(shape, *pair)),
    *(case for shape in MORE for case in row_cases(shape, *PAIRS[0])),
    *row_cases("bitmap of wide rows", F16, F16),
    *(case for name in FORMATS for case in quantized_row_cases(name, 256, F32)),
    *(case for name in FORMATS for case in quantized_row_cases(name, 64, BF16)),
    *quantized_row_cases("sign", 16384, F16),
]
CASES = {case.name: case for case in _CASES}
