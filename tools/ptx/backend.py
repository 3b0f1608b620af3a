"""The executor, and the backend "ptx-cuda", which runs the CUDA kernels' PTX on CPU tensors."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import torch

from dct_kernels import row_layout
from dct_kernels._ops import OPS, checked
from dct_kernels.layout import QUANTIZED_CODES, range_length

from . import build

MULTIPROCESSORS = 132  # as on an H100 and an H200
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def to_c(argument: torch.Tensor | torch.dtype | int | float | None):
    if isinstance(argument, torch.Tensor):
        return ctypes.c_int64(argument.data_ptr())
    if isinstance(argument, torch.dtype):
        return ctypes.c_int64(_DTYPES[argument])
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return ctypes.c_int64(0 if argument is None else int(argument))


class Launches(NamedTuple):
    """The numbers of kernels and memsets that an op launched."""

    kernels: int
    memsets: int


class Executor:
    """A library that `build` has built, with the executor and the launchers."""

    device = "cpu"

    def __init__(self, path):
        self._library = ctypes.CDLL(str(path))
        for function in ("ptx_error", "ptx_counts", "ptx_text"):
            getattr(self._library, function).restype = ctypes.c_char_p

    def configure(self, seed: int, resident_blocks: int = 3) -> None:
        """Choose the execution order. Seed 0 runs warp after warp, with lanes in lock-step."""
        self._library.ptx_configure(ctypes.c_int64(seed), ctypes.c_int64(resident_blocks))

    def call(self, op: str, *arguments) -> None:
        """Call a launcher. Only tensor arguments are device memory."""
        fields = b"".join(bytes(to_c(argument)) for argument in arguments)
        self._on_device(op, lambda: getattr(self._library, op)(fields), arguments)

    def tile_as_for(self, times: int) -> None:
        """Make mask_pack choose its tiles as for tensors that are `times` times as large."""
        self._library.mask_pack_size_factor(ctypes.c_int64(times))
        self.set_multiprocessors(max(MULTIPROCESSORS // times, 1))

    def set_multiprocessors(self, multiprocessors: int) -> None:
        self._library.ptx_multiprocessors(ctypes.c_int64(multiprocessors))

    def load(self, text: str) -> None:
        """Load the kernels of a PTX text, in addition to the kernels of the launchers."""
        self._check("load", self._library.ptx_load(text.encode()))

    def launch(
        self,
        kernel: str,
        blocks: int,
        threads: int,
        *arguments,
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel. Arguments are 64-bit integers, and tensors, which are device memory."""
        values = [to_c(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = [ctypes.c_int64(size) for size in (blocks, threads, shared_bytes)]

        def run() -> int:
            return self._library.ptx_launch(kernel.encode(), *sizes, pointers)

        self._on_device(kernel, run, arguments)

    def counts(self) -> str:
        """The counts since the last `configure`. runtime.cpp describes the format."""
        return self._library.ptx_counts().decode()

    def launches(self) -> Launches:
        """The number of launches since the last `configure`."""
        totals, *_ = self.counts().split("\n\n")
        return Launches(*map(int, totals.split()[2:]))

    def text(self, kernel: str) -> str:
        """The PTX module that contains the kernel."""
        return self._library.ptx_text(kernel.encode()).decode()

    def _on_device(self, name: str, function, arguments) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        for tensor in tensors:
            written = not vars(tensor).pop("is_poisoned", False)  # False for a result
            self._library.ptx_allocate(to_c(tensor), *map(ctypes.c_int64, (tensor.nbytes, written)))
        try:
            self._check(name, function())
        finally:
            for tensor in tensors:
                self._library.ptx_free(to_c(tensor))

    def _check(self, name: str, error: int) -> None:
        if error:
            message = self._library.ptx_error().decode()
            raise RuntimeError(f"{name} returned cudaError_t {error}: {message}")


@functools.cache
def executor() -> Executor:
    return Executor(build.build())


# --- The ops, with the signatures of torch.ops.dct. Each op allocates poisoned results, and passes
# the fields of the argument struct in common/ops.h to its launcher.


_libraries: list = []


@contextlib.contextmanager
def use_library(library) -> Iterator[None]:
    """Let the ops call `library` instead of the executor, without poisoning results."""
    _libraries.append(library)
    try:
        yield
    finally:
        _libraries.pop()


def _call(op: str, *fields) -> None:
    (_libraries[-1] if _libraries else executor()).call(op, *fields)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that kernels must not read before writing. Its unusual values reveal entries that
    are never written."""
    if _libraries:
        return torch.empty(shape, dtype=dtype, device=_libraries[-1].device)
    out = torch.empty(shape, dtype=dtype)
    out.view(torch.uint8).fill_(0xAB)
    out.is_poisoned = True
    return out


def sample_threshold(grad, residual, density, ranges=1, max_samples=65536, seed=0, inv_scale=None):
    threshold = poisoned(ranges, dtype=torch.float32)
    source = grad, grad.dtype, residual, grad.numel(), ranges
    sampling = float(density), max_samples, seed & 0xFFFFFFFF
    _call("sample_threshold", *source, *sampling, inv_scale, threshold)
    return threshold


def mask_pack(residual, grad, threshold, payload, seen, capacity, value_dtype, inv_scale=None):
    ranges = payload.shape[0] if payload.dim() == 2 else 1
    source = residual, grad, grad.dtype, grad.numel(), ranges, threshold
    _call("mask_pack", *source, seen, payload, capacity, value_dtype, inv_scale)


def scatter_unpack(payloads, out, capacity, value_dtype, scale=1.0, out_scale=None):
    status = poisoned(payloads.shape[0], dtype=torch.int32)
    ranges = payloads.shape[1] if payloads.dim() == 3 else 1
    source = payloads, payloads.shape[0], ranges, capacity, value_dtype
    to = out, out.dtype, out.numel(), float(scale)
    _call("scatter_unpack", *source, *to, out_scale, status)
    return status


def quantize_pack(residual, grad, payload, format, inv_scale=None):
    ranges = payload.shape[0] if payload.dim() == 2 else 1
    to = payload, ranges, range_length(grad, ranges), payload.shape[-1], QUANTIZED_CODES[format]
    _call("quantize_pack", residual, grad, grad.dtype, grad.numel(), *to, inv_scale)


def dequantize_sum(payloads, out, format, scale=1.0, out_scale=None):
    ranks, ranges = payloads.shape[0], payloads.shape[1] if payloads.dim() == 3 else 1
    status = poisoned(ranks, *out.shape[:-1], dtype=torch.int32)
    source = payloads, ranks, ranges, range_length(out, ranges), payloads.shape[-1]
    to = QUANTIZED_CODES[format], out, out.dtype, out.numel(), float(scale), out_scale
    _call("dequantize_sum", *source, *to, status, *out.shape[:-1] or (1,))
    return status


def row_pack(x, k, value_dtype):
    rows, width = x.shape
    values = poisoned(rows, k, dtype=value_dtype)
    positions = poisoned(rows, row_layout.position_bytes(width, k), dtype=torch.uint8)
    _call("row_pack", x, x.dtype, rows, width, k, values, value_dtype, positions)
    return values, positions


def row_gather(x, positions, k, value_dtype):
    values = poisoned(x.shape[0], k, dtype=value_dtype)
    _call("row_gather", x, x.dtype, positions, *x.shape, k, values, value_dtype)
    return values


def row_unpack(values, positions, width, dtype):
    rows, k = values.shape
    out = poisoned(rows, width, dtype=dtype)
    _call("row_unpack", values, values.dtype, positions, rows, width, k, out, dtype)
    return out


def row_quantize(x, format):
    rows, width = x.shape
    out = poisoned(rows, row_layout.row_bytes(width, format), dtype=torch.uint8)
    _call("row_quantize", x, x.dtype, rows, width, row_layout.FORMATS.index(format), out)
    return out


def row_dequantize(rows, width, format, dtype):
    out, code = poisoned(rows.shape[0], width, dtype=dtype), row_layout.FORMATS.index(format)
    _call("row_dequantize", rows, rows.shape[0], width, code, out, dtype)
    return out


def row_dequantize_sum(rows, width, format, dtype):
    ranks, batch, _ = rows.shape
    out, code = poisoned(batch, width, dtype=dtype), row_layout.FORMATS.index(format)
    _call("row_dequantize_sum", rows, ranks, batch, width, code, out, dtype)
    return out


def diff_pack(weights, snapshot, patch, checksums, capacity):
    source = weights, weights.dtype, snapshot, snapshot.dtype, snapshot.numel()
    _call("diff_pack", *source, patch, checksums, capacity)


def patch_check(patch, numel, dtype):
    status = poisoned(1, dtype=torch.int32)
    _call("patch_apply", patch, patch.numel(), numel, dtype, status, None)
    return status


def patch_apply(patch, weights):
    status = poisoned(1, dtype=torch.int32)
    size = weights.numel(), weights.dtype
    _call("patch_apply", patch, patch.numel(), *size, status, weights)
    return status


def checksum(weights):
    result = poisoned(1, dtype=torch.int64)
    _call("checksum", weights, weights.numel(), result)
    return result


_OPS = SimpleNamespace(**{op: globals()[op] for op in OPS})
BACKEND = SimpleNamespace(**{op: checked(getattr(_OPS, op), op) for op in OPS}, device="cpu")
