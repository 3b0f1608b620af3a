"""How a model lies on the ranks, and how replicas of its tables meet."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dct_embeddings import ReplicaSync

from .data.features import table_rows
from .models.dlrm import DLRM
from .models.factorised import FeatureModel
from .models.hybrid import HybridDLRM
from .models.row_exchange import EXCHANGES
from .models.sharding import shard_tables
from .models.substituted import SubstitutedModel
from .models.two_dimensional import TwoDimensionalDLRM, ranks_of_a_group


def plan_tables(options: argparse.Namespace) -> list[list[int]]:
    """The tables of every rank among which they are sharded."""
    ranks = dist.get_world_size()
    if options.parallel == "2d":
        ranks = ranks_of_a_group(ranks, options.replicas)
    return shard_tables(table_rows(options.hash_size), ranks)


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
    if options.parallel == "hybrid":
        model = HybridDLRM(model, plan, exchange, options.dedup)
    else:
        model = TwoDimensionalDLRM(model, plan, options.replicas, exchange, options.dedup)
    model.mlps = _replicated(model.mlps, options)
    return model, model.mlps


def make_sync(
    model: nn.Module, optimizer: Optimizer, mode: str, options: argparse.Namespace
) -> ReplicaSync | None:
    """What averages the replicas of a model's tables, if it has any.

    It notes every row that `optimizer` changes from now on: weights and `optimizer` are loaded by
    then.
    """
    if not isinstance(model, TwoDimensionalDLRM):
        return None
    return ReplicaSync(model.tables, optimizer, options.sync_every, **_sync_format(mode, options))


def _sync_format(mode: str, options: argparse.Namespace) -> dict[str, object]:
    """What crosses at a sync, as the mode's gradients do: see `ReplicaSync`."""
    if mode == "bf16":
        return {"dtype": torch.bfloat16}
    if mode != "dct" or options.sync_dtype == "float32":
        return {}
    if options.sync_dtype is not None:
        return {"dtype": getattr(torch, options.sync_dtype)}
    return {"density": options.sync_density}


def _replicated(module: nn.Module, options: argparse.Namespace) -> DistributedDataParallel:
    return DistributedDataParallel(
        module, bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True
    )
