"""Every entry in few bits, by blocks of other sizes than those of dct_parallel, for dp_density.py.

A quantizer turns a flat tensor into what its receiver has: float32, of the same size. Bytes are
those of a payload without its header, by formula.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dct_kernels import row_dequantize, row_quantize
from dct_kernels.layout import ROW
from dct_kernels.row_layout import code_bytes
from dct_parallel.wire import all_gather_bytes

from .dp_local import Averaging
from .dp_ranks import Exchange
from .mxfp4 import E2M1

E4M3_BLOCK, E4M3_MOST = 16, 448.0
MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise(E2M1)]


def by_scale(x: Tensor, width: int, format: str) -> Tensor:
    """As `row_quantize` of blocks of `width` elements: a bfloat16 scale each."""
    blocks = row_quantize(_rows(x, width), format)
    return row_dequantize(blocks, width, format, torch.float32).view(-1)[: len(x)]


def by_two_scales(x: Tensor) -> Tensor:
    """E2M1 codes, for every 16 of them a scale in E4M3, and for every row one in bfloat16.

    NVFP4, with a scale of the row in place of the tensor's.
    """
    rows = _rows(x, ROW)
    blocks = rows.view(-1, ROW // E4M3_BLOCK, E4M3_BLOCK)
    outer = rows.abs().amax(1)[:, None, None] / (E2M1[-1] * E4M3_MOST)
    outer = outer.bfloat16().float()
    inner = blocks.abs().amax(2, keepdim=True) / E2M1[-1] / outer
    inner = inner.nan_to_num(0.0).clamp(max=E4M3_MOST).to(torch.float8_e4m3fn).float()
    scale = outer * inner
    magnitude = torch.where(scale > 0, blocks.abs() / scale, 0.0)
    codes = torch.bucketize(magnitude, torch.tensor(MIDDLES))
    sent = blocks.sign() * torch.tensor(E2M1)[codes] * scale
    return sent.view(-1)[: len(x)]


def _rows(x: Tensor, width: int) -> Tensor:
    """Rows of so many elements, zeros behind the last."""
    return nn.functional.pad(x, (0, -len(x) % width)).view(-1, width)


class Quantizer(NamedTuple):
    apply: Callable[[Tensor], Tensor]
    row_bytes: int

    def nbytes(self, numel: int) -> int:
        return math.ceil(numel / ROW) * self.row_bytes


def quantizer(format: str, width: int) -> Quantizer:
    """Of "int8", "int4" or "ternary" in blocks of `width`, which divides a row; or "e2m1"."""
    if format == "e2m1":
        return Quantizer(by_two_scales, ROW // 2 + ROW // E4M3_BLOCK + 2)
    return Quantizer(
        lambda x: by_scale(x, width, format), code_bytes(ROW, format) + 2 * ROW // width
    )


class Feedback:
    """A quantizer whose errors are added to the next tensor, for every rank."""

    def __init__(self, ranks: int, numel: int, quantize: Quantizer) -> None:
        self.residuals = [torch.zeros(numel) for _ in range(ranks)]
        self.quantize = quantize

    def mean(self, tensors: Sequence[Tensor]) -> Tensor:
        """Of what the ranks send, as every one of them has it."""
        total = torch.zeros_like(self.residuals[0])
        for residual, own in zip(self.residuals, tensors, strict=True):
            residual += own
            sent = self.quantize.apply(residual)
            residual -= sent
            total += sent
        return total / len(tensors)

    def wire_bytes(self) -> int:
        numel = len(self.residuals[0])
        return all_gather_bytes(self.quantize.nbytes(numel), len(self.residuals))


class Blocks(Exchange):
    """Gradients in few bits.

    Args:
        format, width: see `quantizer`.
        exact: "vectors": parameters of one dimension, biases and norms, go in bfloat16.
    """

    def __init__(
        self, shapes, ranks: int, format: str, width: int = ROW, exact: str | None = None
    ) -> None:
        super().__init__(shapes, ranks)
        self.exact, coded = None, sum(self.sizes)
        if exact is not None:
            self.exact = torch.cat([torch.full((s.numel(),), len(s) < 2) for s in shapes])
            coded -= int(self.exact.sum())
        self.feedback = Feedback(ranks, coded, quantizer(format, width))

    def start(self, grads: Sequence[Tensor]) -> Tensor:
        return self.all_reduce(grads, torch.bfloat16)

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        self.sent += self.feedback.wire_bytes()
        if self.exact is None:
            return self.feedback.mean(grads)
        mean = torch.empty_like(grads[0])
        mean[~self.exact] = self.feedback.mean([grad[~self.exact] for grad in grads])
        mean[self.exact] = self.all_reduce([grad[self.exact] for grad in grads], torch.bfloat16)
        return mean


class Local(Averaging):
    """What weights have moved by every `period` steps, in few bits.

    Args:
        format, width: see `quantizer`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        period: int,
        format: str,
        width: int = ROW,
        **settings,
    ) -> None:
        super().__init__(models, period, **settings)
        self.feedback = Feedback(self.ranks, sum(self.sizes), quantizer(format, width))

    def change(self, moved: Sequence[Tensor]) -> Tensor:
        self.sent += self.feedback.wire_bytes()
        return self.feedback.mean(moved)
