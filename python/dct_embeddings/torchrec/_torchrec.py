"""Private names of TorchRec that this folder reads. Any version of TorchRec may change them.

Tested with torchrec 1.8.0 and 1.9.2.
"""

from typing import Any

from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection


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
