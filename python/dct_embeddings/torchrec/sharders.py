"""Sharders whose exchanges of embeddings send quantized rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.types import ModuleSharder

from dct_kernels import checks
from dct_parallel import RowFormat

from .registry import RowRegistry
from .sharding import BagSharder, RowSharder

_OP = "compressed_sharders"
_FORMAT = RowFormat("int4", backward="sign")


@checks.names_keywords
def compressed_sharders(
    *,
    format: str | torch.dtype | RowFormat = _FORMAT,
    fused_params: Mapping[str, Any] | None = None,
    use_index_dedup: bool = False,
) -> list[ModuleSharder[Any]]:
    """Create sharders of EmbeddingBagCollection and EmbeddingCollection that compress rows.

    Tables are float32, with any plan. With table- and column-wise sharding, rows and their
    gradients are compressed in all-to-alls. With row-wise sharding, each rank sends its part of
    each sum, the receiver adds the parts in rank order in float32, and gradients are all-gathered.
    With table-row-wise sharding, TorchRec sums in float32 within a node, and only the all-to-all
    between nodes is compressed. Gradients are straight-through. Results are deterministic. See
    docs/guide/torchrec.md.

    The entries of a group share one scale. The size of a group is the greatest common divisor of
    the shard widths, over the tables of a collection with the same sharding type.

    Args:
        format: see `all_to_all_rows`. It has no density, and is the same on every rank. With
            "float32", results equal TorchRec's bit for bit, except for the order of sums over more
            than two ranks.
        fused_params: as for TorchRec's sharders.
        use_index_dedup: as for EmbeddingCollectionSharder.

    Returns:
        Two sharders, for TorchRec's planner and `DistributedModelParallel`. With them the planner
        may also choose row-wise sharding on the CPU.

    Raises:
        ValueError, TypeError: an argument is out of range.
        ValueError: `format` differs between ranks. The constructor of a model with row-wise tables
            raises this error on every rank, with the formats of all ranks.

    Source: this project adds the row-wise exchange. Other exchanges use TorchRec's codecs.

    >>> dmp = DistributedModelParallel(model, sharders=compressed_sharders(format="int4"))
    """
    row_format = RowFormat.parse(_OP, format)
    if row_format.density is not None:
        checks.fail(_OP, "format", "without a density (all entries are sent)", row_format)
    params = None if fused_params is None else dict(fused_params)
    registry = RowRegistry.for_planner(row_format)
    return [BagSharder(params, registry), RowSharder(params, registry, use_index_dedup)]
