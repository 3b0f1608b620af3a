"""Private names of TorchRec that this folder uses. Any version of TorchRec may change them.

Tested with torchrec 1.8.0 and 1.9.2.
"""

import math
import operator
from collections.abc import Sequence
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
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.types import Awaitable, NoWait, ShardingEnv, ShardingType

from dct_parallel.groups import compare
from dct_parallel.rows.reduce_scatter import reduce_scatter_rows_async
from dct_parallel.rows.transfer import Transfer

from .codecs import RowCodecs

_ROW_WISE = ShardingType.ROW_WISE.value


class BagSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """TorchRec's sharder, with RowCodecs for the exchanges of embeddings."""

    def shard(
        self,
        module: nn.Module,
        params: dict[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> "ShardedBags":
        return ShardedBags(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Add row-wise sharding, which TorchRec does not offer on the CPU.

        TorchRec omits it because gloo can only reduce-scatter tensors of equal size.
        """
        return list(dict.fromkeys([*super().sharding_types(compute_device_type), _ROW_WISE]))

    @property
    def sharded_module_type(self) -> type["ShardedBags"]:
        return ShardedBags


class RowSharder(EmbeddingCollectionSharder):  # type: ignore[misc]
    """Like BagSharder, for collections that return the row of each id."""

    def shard(
        self,
        module: nn.Module,
        params: dict[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> "ShardedRows":
        return ShardedRows(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type["ShardedRows"]:
        return ShardedRows


class ShardedBags(ShardedEmbeddingBagCollection):  # type: ignore[misc]
    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: RowCodecs | None = None,
    ) -> EmbeddingSharding:
        codecs = _codecs_of_shards(sharding_infos, qcomm_codecs_registry)
        if sharding_infos[0].param_sharding.sharding_type == _ROW_WISE:
            if device is not None and device.type == "meta":
                replace_placement_with_meta_device(sharding_infos)
            return _RowWise(sharding_infos, env, device, qcomm_codecs_registry=codecs)
        return super().create_embedding_bag_sharding(
            sharding_infos, env, device, permute_embeddings, codecs
        )


class ShardedRows(ShardedEmbeddingCollection):  # type: ignore[misc]
    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: RowCodecs | None = None,
    ) -> EmbeddingSharding:
        codecs = _codecs_of_shards(sharding_infos, qcomm_codecs_registry)
        return super().create_embedding_sharding(sharding_type, sharding_infos, env, device, codecs)


def _codecs_of_shards(
    infos: list[EmbeddingShardingInfo], codecs: RowCodecs | None
) -> RowCodecs | None:
    """Codecs with a width that divides all shard widths, or None if each rank has whole tables."""
    specs = [info.param_sharding.sharding_spec for info in infos]
    widths = [shard.shard_sizes[1] for spec in specs if spec for shard in spec.shards]
    return RowCodecs(codecs.format, math.gcd(*widths)) if codecs and widths else None


class _RowWise(RwPooledEmbeddingSharding):  # type: ignore[misc]
    def create_output_dist(self, device: torch.device | None = None) -> "_RowWiseDist":
        codecs = self.qcomm_codecs_registry
        # Ranks compare formats once, here, because the exchange itself does not compare them.
        if device is not None and device.type != "meta":
            op, formats = "compressed_sharders", codecs.format.formats(torch.float32)
            settings = {"format": ", ".join(dict.fromkeys(formats))}
            compare(op, settings, self._pg, device)
        return _RowWiseDist(self._pg, self.embedding_dims(), codecs)


class _RowWiseDist(BaseEmbeddingDist):  # type: ignore[misc]
    """Sums quantized pooled rows over ranks. It replaces TorchRec's reduce-scatter."""

    def __init__(self, group: dist.ProcessGroup, dims: Sequence[int], codecs: RowCodecs) -> None:
        super().__init__()
        self._group, self._dims, self._codecs = group, dims, codecs

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext
    ) -> Awaitable[Tensor]:
        """Sum rows [samples of all ranks, sum of dims] over ranks, for the samples of this rank.

        If features have different batch sizes, input and output are flat, ordered by rank and then
        by feature.
        """
        if self._group.size() == 1:
            return NoWait(local_embs)
        width, dims = self._codecs.width, self._dims
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
            format=self._codecs.format,
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


def dense_part(dmp: DistributedModelParallel) -> nn.Module:
    """The part of the model that is not sharded, wrapped in DDP after init_data_parallel."""
    wrapped: nn.Module = dmp._dmp_wrapped_module
    return wrapped


def contexts(dmp: DMPCollection) -> list[Any]:
    """The weights and optimizer states that `dmp.sync()` averages, with their groups."""
    found: list[Any] = dmp._ctxs
    return found


def all_reduce_hook(dmp: DMPCollection) -> object:
    """The hook that `dmp.sync()` calls instead of an all-reduce, or None."""
    names = ("_custom_all_reduce", "_all_reduce_hook")
    return next((hook for name in names if (hook := getattr(dmp, name, None)) is not None), None)


def uses_relay(dmp: DMPCollection) -> bool:
    """Whether `dmp.sync()` bypasses hooks."""
    return bool(getattr(dmp, "_use_sharded_relay", False))
