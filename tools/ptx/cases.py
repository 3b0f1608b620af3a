"""The calls whose instructions and memory sectors are counted: small cases of bench.kernels."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.microbench import cases
from bench.microbench.cases import BF16, F32, Case
from dct_kernels.layout import QUANTIZED_CODES
from dct_kernels.row_layout import FORMATS

NUMEL, LARGEST = 2**17, 2**28  # elements of counted calls, and of the largest timed calls
ROW_NUMEL = 2**16
KEPT = 0.05  # density of packed rows


@dataclass(frozen=True)
class Maker:
    """Creates a case, always with the same random numbers. Its costs are per element."""

    op: str
    elements: int
    arguments: tuple

    def __str__(self) -> str:
        return " ".join([self.op, *(str(a).removeprefix("torch.") for a in self.arguments)])

    def __call__(self) -> Case:
        torch.manual_seed(0)
        make, (first, *rest) = getattr(cases, self.op), self.arguments
        with cases.buffers_of(1):
            if self.op == "sample_threshold":  # no two samples are in the same sector
                return make("cpu", 32 * self.elements, 0.01, most=first, line=32)
            if self.op.startswith("row_"):
                return make("cpu", self.elements // first, first, *rest)
            return make("cpu", self.elements, first, *rest)


def _cases() -> Iterator[tuple]:
    """Yield (op, elements, arguments of the case)."""
    for density in (0.01, 0.001):
        for dtypes in ((F32, F32), (F32, BF16), (BF16, BF16)):
            yield "mask_pack", NUMEL, density, *dtypes
    for samples in (4096, 8192, 16384, 65536):
        yield "sample_threshold", samples, samples
    for density, ranks in ((0.01, 2), (0.01, 8), (0.01, 64), (0.001, 8)):
        yield "scatter_unpack", NUMEL, density, ranks
    for format in QUANTIZED_CODES:
        yield "quantize_pack", NUMEL, F32, format
        for ranks in (2, 8):
            yield "dequantize_sum", NUMEL, format, ranks
    yield "quantize_pack", NUMEL, BF16, "int4"
    yield "dequantize_sum", NUMEL, "int4", 64
    yield "dequantize_sum", NUMEL, "int4", 2, BF16
    for width in (64, 128, 256, 512, 1024, 4096):
        for dtype in (F32, BF16):
            yield "row_pack", ROW_NUMEL, width, KEPT, dtype
        yield "row_unpack", ROW_NUMEL, width, KEPT
    for width in (64, 256, 1024):
        yield "row_gather", ROW_NUMEL, width, KEPT
        for format in FORMATS:
            yield "row_quantize", ROW_NUMEL, width, format
            yield "row_dequantize", ROW_NUMEL, width, format
    for width in (16, 32, 4096):
        for format in FORMATS:
            yield "row_quantize", ROW_NUMEL, width, format
    for op in ("row_quantize", "row_dequantize"):
        yield op, ROW_NUMEL, 256, "int4", BF16
    for format in FORMATS:
        for ranks in (2, 8):
            yield "row_dequantize_sum", ROW_NUMEL, 64, format, ranks
    for width, dtype in ((256, F32), (1024, F32), (256, BF16)):
        yield "row_dequantize_sum", ROW_NUMEL, width, "int4", 4, dtype
    for changed in (0.005, 0.03):
        yield "diff_pack", NUMEL, changed
        yield "patch_apply", NUMEL, changed
    yield "diff_pack", NUMEL, 0.03, True


CASES = [Maker(op, elements, tuple(arguments)) for op, elements, *arguments in _cases()]
OPS = list(dict.fromkeys(make.op for make in CASES))
