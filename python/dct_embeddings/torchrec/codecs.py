"""Rows in few bits in TorchRec's all-to-all of embeddings."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from dct_kernels import checks
from dct_parallel import RowFormat
from dct_parallel.rows.codecs import dequantize, format_bytes, quantize

_OP = "qcomm_codecs"
_FORMAT = RowFormat("int4", backward="sign")
_REDUCE_SCATTER = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name


@checks.names_keywords
def qcomm_codecs(
    width: int, *, format: str | torch.dtype | RowFormat = _FORMAT
) -> dict[str, QuantizedCommCodecs]:
    """Codecs for a sharder: a number format for embeddings, and one for their gradients.

    For float32 tables, pooled or not, that are sharded table-, column- or table-column-wise. Each
    `width` entries share a scale. The gradient is straight-through, quantized on its way. "float32"
    gives the same bits as the exchange without codecs. Deterministic. See docs/guide/torchrec.md.

    Args:
        width: entries that share a scale. It must divide the width of every shard. TorchRec passes
            only sums of widths per rank to a codec, so only these are checked.
        format: as of `all_to_all_rows`, without a density.

    Returns:
        A `qcomm_codecs_registry`. It raises ValueError if TorchRec asks for a codec of a
        reduce-scatter, because row-wise and table-row-wise sharding would sum bytes.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it. In the first
            exchange, on every rank: `width` does not divide the sum of widths of a rank.

    Source: our reconstruction of row-wise quantized exchange, as TorchRec's QuantizedCommCodec.

    >>> sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=qcomm_codecs(64))
    """
    checks.require_int(_OP, "width", width, 1, 2**31 - 1)
    row_format = RowFormat.parse(_OP, format)
    if row_format.density is not None:
        rule = "without a density: every entry is sent"
        raise ValueError(f"dct::{_OP}: format must be {rule}, got {row_format}")
    formats = row_format.formats(torch.float32)
    codecs = QuantizedCommCodecs(*(TorchRecCodec(width, format) for format in formats))
    ops = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL)
    return _Registry({op.name: codecs for op in ops})


class TorchRecCodec:
    """TorchRec's QuantizedCommCodec of rows of `width` entries, in one number format.

    A message is uint8, `format_bytes` per row. The codec has no context, because TorchRec's code
    for padding and for varying batches takes another path if there is one.
    """

    quantized_dtype = torch.uint8

    def __init__(self, width: int, format: str) -> None:
        self._width, self._format, self._bytes = width, format, format_bytes(width, format)

    def encode(self, input_tensor: Tensor, ctx: object = None) -> Tensor:
        return quantize(input_tensor.reshape(-1, self._width), self._format).flatten()

    def decode(self, input_grad: Tensor, ctx: object = None) -> Tensor:
        rows = input_grad.view(-1, self._bytes)
        return dequantize(rows, self._width, self._format, torch.float32).flatten()

    def calc_quantized_size(self, input_len: int, ctx: object = None) -> int:
        self._require_rows("elements of a message", [input_len])
        return input_len // self._width * self._bytes

    def create_context(self) -> None:
        return None

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: Sequence[int], my_rank: int, qcomm_ctx: object
    ) -> tuple[int, int]:
        self._require_rows("widths of shards, summed by rank,", list(dim_per_rank))
        return input_tensor.shape[-1], 0

    def _require_rows(self, arg: str, sizes: list[int]) -> None:
        if any(size % self._width for size in sizes):
            rule = f"multiples of width {self._width}"
            raise ValueError(f"dct::{_OP}: {arg} must be {rule}, got {sizes}")


class _Registry(dict[str, QuantizedCommCodecs]):
    """Codecs by the collective's name. TorchRec calls `get` when it shards a module."""

    def get(self, key: str, default: Any = None) -> Any:
        if key == _REDUCE_SCATTER:
            rule = "table-, column- or table-column-wise"
            got = "rows on several ranks: their reduce-scatter would sum bytes"
            raise ValueError(f"dct::{_OP}: sharding must be {rule}, got {got}")
        return super().get(key, default)
