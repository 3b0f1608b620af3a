"""Sharders whose exchanges of embeddings send rows in few bits."""

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.types import ModuleSharder

from dct_kernels import checks
from dct_parallel import RowFormat

from ._torchrec import BagSharder, RowSharder
from .codecs import RowCodecs

_OP = "compressed_sharders"
_FORMAT = RowFormat("int4", backward="sign")


@checks.names_keywords
def compressed_sharders(
    *,
    format: str | torch.dtype | RowFormat = _FORMAT,
    fused_params: Mapping[str, Any] | None = None,
    use_index_dedup: bool = False,
) -> list[ModuleSharder[Any]]:
    """Sharders of EmbeddingBagCollection and EmbeddingCollection that send rows compressed.

    For float32 tables under any plan. Table- and column-wise, rows travel in an all-to-all in a
    number format, and their gradients back in one. Row-wise, each rank sends its part of each sum,
    and the receiver adds the parts in rank order in float32; gradients are all-gathered.
    Table-row-wise, TorchRec sums in float32 within a node, and only the all-to-all between nodes is
    compressed. Gradients are straight-through. Deterministic. See docs/guide/torchrec.md.

    Entries share a scale in groups, as many as the greatest common divisor of the widths of shards,
    among the tables of a collection that are sharded in the same way.

    Args:
        format: as of `all_to_all_rows`, without a density; the same on every rank. "float32" gives
            the same bits as TorchRec's sharders, except for the order of sums over more than two
            ranks.
        fused_params: as of TorchRec's sharders.
        use_index_dedup: as of EmbeddingCollectionSharder.

    Returns:
        Two sharders, for TorchRec's planner and `DistributedModelParallel`. With them the planner
        may choose row-wise sharding also on the CPU.

    Raises:
        ValueError, TypeError: an argument is out of its range; the text names it.
        ValueError: `format` differs between ranks. The constructor of a model with row-wise tables
            raises it on every rank, with the formats of all ranks.

    Source: the row-wise exchange is this project's own; the others use TorchRec's codecs interface.

    >>> dmp = DistributedModelParallel(model, sharders=compressed_sharders(format="int4"))
    """
    row_format = RowFormat.parse(_OP, format)
    if row_format.density is not None:
        checks.fail(_OP, "format", "without a density: every entry is sent", row_format)
    params = None if fused_params is None else dict(fused_params)
    codecs = RowCodecs.for_planner(row_format)
    return [BagSharder(params, codecs), RowSharder(params, codecs, use_index_dedup)]
