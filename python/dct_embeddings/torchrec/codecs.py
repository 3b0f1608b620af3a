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


def qcomm_codecs(
    width: int, *, format: str | torch.dtype | RowFormat = _FORMAT
) -> dict[str, QuantizedCommCodecs]:
    """Codecs for a sharder: a number format for embeddings, and one for their gradients.

    For tables that are sharded table-, column- or table-column-wise, pooled or not, of float32
    embeddings. Each `width` entries have a scale of their own. The gradient is straight-through:
    that of the received embeddings, quantized on its way. "float32" is the exchange without codecs,
    bit for bit. Deterministic. What else to know: docs/guide/torchrec.md.

    Our reconstruction of row-wise quantized exchange, by TorchRec's own plug (QuantizedCommCodec).

    Args:
        width: entries with a scale of their own. It must divide the width of every shard: their
            greatest common divisor, or less. TorchRec tells a codec only sums of widths per rank.
        format: as of `all_to_all_rows`, without a density.

    Returns:
        A `qcomm_codecs_registry`. It raises ValueError if TorchRec asks for a codec of a
        reduce-scatter: row-wise and table-row-wise sharding sum messages, which are bytes here.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it. In the first
            exchange: `width` does not divide the sum of widths on some rank; on every rank.

    >>> sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=qcomm_codecs(64))
    """
    checks.require_int(_OP, "width", width, 1, 2**31 - 1)
    row_format = RowFormat.parse(_OP, format)
    if row_format.density is not None:
        checks.fail(_OP, "format", "without a density: every entry is sent", row_format)
    codecs = QuantizedCommCodecs(
        *(TorchRecCodec(width, f) for f in row_format.formats(torch.float32))
    )
    ops = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL)
    return _Registry({op.name: codecs for op in ops})


class TorchRecCodec:
    """TorchRec's QuantizedCommCodec of rows of `width` entries, in one number format.

    A message is uint8, `format_bytes` per row. It has no context, because TorchRec's code for
    padding and for varying batches looks for one first.
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
            checks.fail(_OP, arg, f"multiples of width {self._width}", sizes)


class _Registry(dict[str, QuantizedCommCodecs]):
    """Codecs by name of the collective. TorchRec calls `get` when it shards a module."""

    def get(self, key: str, default: Any = None) -> Any:
        if key == _REDUCE_SCATTER:
            rule, got = "table-, column- or table-column-wise", "rows on several ranks"
            checks.fail(_OP, "sharding", rule, f"{got}: their reduce-scatter would sum bytes")
        return super().get(key, default)
