"""The entry point `compress_fully_shard`. It imports FSDP2 only when it is called."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from dct_kernels import checks

from ..formats import require_format
from ..groups import require_group, sharing_errors

if TYPE_CHECKING:
    from .compressed import CompressedShards

OP = "compress_fully_shard"  # in errors
FORMATS = ("float32", "bfloat16", "int8", "int4")


@checks.names_keywords
def compress_fully_shard(
    model: nn.Module,
    *,
    weights: str | torch.dtype | None = "int8",
    gradients: str | torch.dtype | None = "int8",
) -> "CompressedShards":
    """Quantize the weights and gradients that FSDP2 sends between the shards of a model.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        state = compress_fully_shard(model, weights="int8", gradients="int8")

    Call it on every rank after wrapping all modules. It replaces the all-gather and the
    reduce-scatter of every module. All ranks compute with bitwise equal rounded weights in
    all passes between two optimizer steps. The sharded parameters and the optimizer are not
    rounded. Parameters with fewer than two dimensions are never rounded. Gradients are summed in
    float32 in rank order, without error feedback. torch's collectives remain in use for a module if
    messages would not be smaller, if its weights have several dtypes, or if some of its parameters
    have no gradient. Results are deterministic. See docs/guide/fsdp2.md.

    Args:
        model: modules that `fully_shard` was applied to, on a mesh of one or two dimensions. With
            two (HSDP), torch or `dct_fully_shard_hook` averages over replicas.
        weights: format of the all-gathers: "int8", "int4", "bfloat16", "float32" or a torch dtype.
            None: use torch's all-gather. With "int4", messages contain changes of weights, and
            every rank keeps a copy of the whole model in the dtype of the all-gather.
        gradients: format of the reduce-scatters, as for `weights`. None: torch's reduce-scatter.

    Returns:
        The state: `plan`, `stats`, `state_dict`, `load_state_dict`, `close`.

    Raises:
        ValueError, TypeError: an argument is out of range, ranks differ, or a module has several
            parameter groups, a custom collective, or a parameter with its own all-gather.
        RuntimeError: another rank raised an error, or did not call this in time.

    Source: this project; ZeRO++ (arXiv 2306.10209) quantizes the collectives of sharded training.
    """
    from .compressed import CompressedShards  # FSDP2 takes a second to import
    from .compressed_units import units_of

    formats = {"weights": weights, "gradients": gradients}
    with sharing_errors(OP, require_group(OP, None)):
        names = {
            arg: None if given is None else require_format(OP, arg, given, FORMATS)
            for arg, given in formats.items()
        }
        units = units_of(model)
    return CompressedShards(units, **names)
