"""The function that users call to compress FSDP2 between shards; FSDP2 is imported only then."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from dct_kernels import checks

from ..formats import require_format
from ..groups import refusing, require_group

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
    """Send the weights and gradients of FSDP2 in few bits between the ranks that hold the shards.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        state = compress_fully_shard(model, weights="int8", gradients="int8")

    Call it on every rank, once all modules are wrapped. It replaces the all-gather and the
    reduce-scatter of every module. All ranks compute with the same rounded weights, bit for bit, in
    all forward and backward passes between two steps of the optimizer. The sharded parameters and
    the optimizer are not rounded. Gradients are summed in rank order in float32, without error
    feedback. Parameters of fewer than two dimensions are not rounded. torch's collectives remain
    where messages would not be smaller, where the weights of a module have several dtypes, and
    where some of its parameters have no gradient. Deterministic. Bytes, losses and limits:
    docs/guide/fsdp2.md.

    Args:
        model: modules that `fully_shard` was applied to, on a mesh of one dimension, or of two
            (HSDP; the mean over replicas remains torch's, or that of `dct_fully_shard_hook`).
        weights: format of the all-gathers, "int8", "int4", "bfloat16" or "float32", or the torch
            dtype; None: torch's all-gather. With "int4", messages contain the changes of weights,
            and every rank keeps the whole model once more, in the dtype of the all-gather.
        gradients: format of the reduce-scatters, likewise; None: torch's reduce-scatter.

    Returns:
        The state: `plan`, `stats`, `state_dict`, `load_state_dict`, `close`.

    Raises:
        ValueError, TypeError: an argument is out of its range, a module has several parameter
            groups, a parameter that defines its own all-gather, or a custom collective already, or
            ranks differ; the text names it.
        RuntimeError: a different rank raised, as the text says, or did not call this within the
            timeout of all ranks.

    Source: ours; ZeRO++ (arXiv 2306.10209) quantizes the collectives of sharded training.
    """
    from .compressed import CompressedShards  # late: FSDP2 takes a second to import
    from .compressed_units import units_of

    formats = {"weights": weights, "gradients": gradients}
    with refusing(OP, require_group(OP, None)):
        names = {
            arg: None if given is None else require_format(OP, arg, given, FORMATS)
            for arg, given in formats.items()
        }
        units = units_of(model)
    return CompressedShards(units, **names)
