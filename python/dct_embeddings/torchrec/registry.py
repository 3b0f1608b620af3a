"""Quantized rows as codecs of TorchRec."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from dct_parallel import RowFormat
from dct_parallel.formats import DTYPES
from dct_parallel.rows.codecs import dequantize, format_bytes, quantize

_ALL_TO_ALLS = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL)


class RowRegistry(dict[str, QuantizedCommCodecs]):
    """A `qcomm_codecs_registry` for rows of `width` entries that share a scale."""

    def __init__(self, format: RowFormat, width: int, ops: Iterable[CommOp] = _ALL_TO_ALLS) -> None:
        self.format, self.width = format, width
        formats = format.formats(torch.float32)
        codecs = QuantizedCommCodecs(*(_QuantizedRows(width, name) for name in formats))
        super().__init__({op.name: codecs for op in ops})

    @staticmethod
    def for_planner(format: RowFormat) -> "RowRegistry":
        """Codecs for all ops. TorchRec's planner reads only their dtype."""
        return RowRegistry(format, 1, CommOp)


class _QuantizedRows:
    """A QuantizedCommCodec of TorchRec for rows of `width` entries, in one number format.

    A message is uint8, with `format_bytes` per row. The codec has no context, because with a
    context TorchRec takes a different path for variable batch sizes.
    """

    def __init__(self, width: int, format: str) -> None:
        self._width, self._format, self._bytes = width, format, format_bytes(width, format)
        self.quantized_dtype = DTYPES.get(format, torch.uint8)  # for the planner's estimate

    def encode(self, input_tensor: Tensor, ctx: object = None) -> Tensor:
        return quantize(input_tensor.reshape(-1, self._width), self._format).flatten()

    def decode(self, input_grad: Tensor, ctx: object = None) -> Tensor:
        rows = input_grad.view(-1, self._bytes)
        return dequantize(rows, self._width, self._format, torch.float32).flatten()

    def calc_quantized_size(self, input_len: int, ctx: object = None) -> int:
        return input_len // self._width * self._bytes

    def create_context(self) -> None:
        return None

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: Sequence[int], my_rank: int, qcomm_ctx: object
    ) -> tuple[int, int]:
        return input_tensor.shape[-1], 0
