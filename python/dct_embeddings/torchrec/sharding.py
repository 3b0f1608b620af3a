"""Subclasses of TorchRec's sharding, whose exchanges send quantized rows.

They override methods that any version of TorchRec may change. Tested with torchrec 1.8.0 and 1.9.2.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    replace_placement_with_meta_device,
)
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.types import Awaitable, NoWait, ShardingEnv, ShardingType

from dct_parallel.groups import compare
from dct_parallel.rows.reduce_scatter import reduce_scatter_rows_async
from dct_parallel.rows.transfer import Transfer

from .registry import RowRegistry

_ROW_WISE = ShardingType.ROW_WISE.value


class ShardedBags(ShardedEmbeddingBagCollection):  # type: ignore[misc]
    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: RowRegistry | None = None,
    ) -> EmbeddingSharding:
        registry = _registry_of_shards(sharding_infos, qcomm_codecs_registry)
        if sharding_infos[0].param_sharding.sharding_type == _ROW_WISE:
            if device is not None and device.type == "meta":
                replace_placement_with_meta_device(sharding_infos)
            return _RowWise(sharding_infos, env, device, qcomm_codecs_registry=registry)
        return super().create_embedding_bag_sharding(
            sharding_infos, env, device, permute_embeddings, registry
        )


class ShardedRows(ShardedEmbeddingCollection):  # type: ignore[misc]
    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: RowRegistry | None = None,
    ) -> EmbeddingSharding:
        registry = _registry_of_shards(sharding_infos, qcomm_codecs_registry)
        return super().create_embedding_sharding(
            sharding_type, sharding_infos, env, device, registry
        )


class _Sharder:
    """Creates a `sharded_module_type`. TorchRec's sharders create their own classes."""

    fused_params: dict[str, Any] | None
    qcomm_codecs_registry: RowRegistry
    sharded_module_type: Callable[..., nn.Module]
    _options: tuple[str, ...]  # attributes of the sharder that its module takes as arguments

    def shard(
        self,
        module: nn.Module,
        params: dict[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        return self.sharded_module_type(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            **{name.removeprefix("_"): getattr(self, name) for name in self._options},
        )


class BagSharder(_Sharder, EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """TorchRec's sharder, with a RowRegistry for the exchanges of embeddings."""

    sharded_module_type = ShardedBags
    _options = ("_sharded_module_order_overwrite",)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Add row-wise sharding, which TorchRec does not offer on the CPU.

        TorchRec omits it because gloo can only reduce-scatter tensors of equal size.
        """
        return list(dict.fromkeys([*super().sharding_types(compute_device_type), _ROW_WISE]))


class RowSharder(_Sharder, EmbeddingCollectionSharder):  # type: ignore[misc]
    """Like BagSharder, for collections that return the row of each id."""

    sharded_module_type = ShardedRows
    _options = ("_use_index_dedup",)


def _registry_of_shards(
    infos: list[EmbeddingShardingInfo], registry: RowRegistry | None
) -> RowRegistry | None:
    """A registry whose width divides all shard widths, or None if each rank has whole tables."""
    specs = [info.param_sharding.sharding_spec for info in infos]
    widths = [shard.shard_sizes[1] for spec in specs if spec for shard in spec.shards]
    return RowRegistry(registry.format, math.gcd(*widths)) if registry and widths else None


class _RowWise(RwPooledEmbeddingSharding):  # type: ignore[misc]
    def create_output_dist(self, device: torch.device | None = None) -> "_RowWiseDist":
        registry = self.qcomm_codecs_registry
        # Ranks compare formats once, here, because the exchange itself does not compare them.
        if device is not None and device.type != "meta":
            op, formats = "compressed_sharders", registry.format.formats(torch.float32)
            compare(op, {"format": ", ".join(dict.fromkeys(formats))}, self._pg, device)
        return _RowWiseDist(self._pg, self.embedding_dims(), registry)


class _RowWiseDist(BaseEmbeddingDist):  # type: ignore[misc]
    """Sums quantized pooled rows over ranks. It replaces TorchRec's reduce-scatter."""

    def __init__(
        self, group: dist.ProcessGroup, dims: Sequence[int], registry: RowRegistry
    ) -> None:
        super().__init__()
        self._group, self._dims, self._registry = group, dims, registry

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext
    ) -> Awaitable[Tensor]:
        """Sum rows [samples of all ranks, sum of dims] over ranks, for the samples of this rank.

        If features have different batch sizes, input and output are flat, ordered by rank and then
        by feature.
        """
        if self._group.size() == 1:
            return NoWait(local_embs)
        width, dims = self._registry.width, self._dims
        if sharding_ctx.variable_batch_per_feature:
            batches = sharding_ctx.batch_size_per_rank_per_feature
            sizes = [sum(map(operator.mul, batch, dims)) for batch in batches]
            shape: tuple[int, ...] = (-1,)
        else:
            sizes = [batch * sum(dims) for batch in sharding_ctx.batch_size_per_rank]
            shape = (-1, sum(dims))
        transfer = reduce_scatter_rows_async(
            local_embs.reshape(-1, width),
            [size // width for size in sizes],
            format=self._registry.format,
            group=self._group,
            average_gradients=get_gradient_division(),
        )
        return _Sums(transfer, shape)


class _Sums(Awaitable[Tensor]):  # type: ignore[misc]
    def __init__(self, transfer: Transfer, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._transfer, self._shape = transfer, shape

    def _wait_impl(self) -> Tensor:
        return self._transfer.wait().view(self._shape)
