"""How a model lies on the ranks, and how replicas of its tables meet."""

import argparse
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dct_embeddings import ReplicaSync, Shard, plan_shards

from .data.dataset import tables_of
from .errors import UsageError
from .models.dlrm import DLRM
from .models.factorised import FeatureModel
from .models.row_exchange import EXCHANGES
from .models.sharded import ShardedDLRM
from .models.substituted import SubstitutedModel


def plan_tables(options: argparse.Namespace) -> list[list[Shard]]:
    """Of every rank of a group, among which tables are sharded, those that it owns, whole."""
    ranks, replicas = dist.get_world_size(), _replicas(options)
    if ranks % replicas:
        raise UsageError(f"--replicas must divide the {ranks} ranks, got {replicas}")
    rows = tables_of(options)
    if ranks // replicas > len(rows):
        raise UsageError(
            f"--ranks must be at most {len(rows)} a replica, one table each, "
            f"got {ranks // replicas}"
        )
    return plan_shards(rows, ranks // replicas)


def describe(plan: Sequence[Sequence[Shard]]) -> str:
    """A line for every rank: how many tables and rows, and which tables."""
    return "\n".join(
        f"rank {rank}: {len(own)} tables, {sum(shard.end - shard.first for shard in own):,} rows: "
        + " ".join(str(shard.table) for shard in own)
        for rank, own in enumerate(plan)
    )


def _replicas(options: argparse.Namespace) -> int:
    return options.replicas if options.parallel == "2d" else 1


def distribute(
    model: DLRM | FeatureModel, mode: str, seed: int, options: argparse.Namespace
) -> tuple[nn.Module, DistributedDataParallel]:
    """The model as `--parallel` says, and what of it every rank has."""
    if options.parallel == "data":
        ddp = _replicated(model, options)
        return ddp, ddp
    if options.parallel == "des":
        model = SubstitutedModel(model, options.dynamic_rows, seed)
        model.dense = _replicated(model.dense, options)
        return model, model.dense
    plan, exchange = plan_tables(options), EXCHANGES[mode](options)
    sparse = options.embedding_optimizer != "sgd"  # whose fused step takes dense ones alone
    model = ShardedDLRM(model, plan, exchange, options.dedup, _replicas(options), sparse)
    model.mlps = _replicated(model.mlps, options)
    return model, model.mlps


def make_sync(
    model: nn.Module, optimizer: Optimizer, mode: str, options: argparse.Namespace
) -> ReplicaSync | None:
    """What averages the replicas of a model's tables, if it has any.

    It notes every row that `optimizer` changes from now on: weights and `optimizer` are loaded by
    then.
    """
    if options.parallel != "2d":
        return None
    settings = _sync_format(mode, options)
    return ReplicaSync(model.tables, optimizer=optimizer, every=options.sync_every, **settings)


def _sync_format(mode: str, options: argparse.Namespace) -> dict[str, object]:
    """What crosses at a sync, as the mode's gradients do: see `ReplicaSync`."""
    if mode == "bf16":
        return {"format": "bfloat16"}
    if mode != "dct":
        return {}
    if options.sync_format is not None:
        return {"format": options.sync_format}
    return {"density": options.sync_density, "format": "bfloat16"}


def _replicated(module: nn.Module, options: argparse.Namespace) -> DistributedDataParallel:
    return DistributedDataParallel(
        module, bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True
    )
