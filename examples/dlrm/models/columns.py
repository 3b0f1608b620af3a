"""A DLRM with a column-split top MLP: each rank has some features of each hidden layer."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_parallel import RowFormat, all_gather_rows, all_to_all_rows

from ..errors import UsageError
from .dlrm import DLRM


class ColumnsDLRM(nn.Module):
    """A DLRM whose top MLP has hidden layers that are split by columns. The rest is on all ranks.

    Ranks exchange features as rows, and the gradients of these rows, in `format`. Each rank gets
    all samples' inputs of the first hidden layer, and all features between hidden layers. After the
    last hidden layer, it gets all features of its own samples. Wrap `mlps` in
    DistributedDataParallel to average all other gradients. Gradients of the split layers are
    divided by the number of ranks, so that all layers can use the same learning rate. Forward and
    backward are collective; all ranks pass equally many samples.

    Args:
        model: the whole DLRM, equal on all ranks.
        format: the format of rows.

    Attributes:
        parts: this rank's columns of the hidden layers.
        mlps: a module with all other parameters, called with (integers, ids).
        rows_group: the process group for rows.
    """

    def __init__(self, model: DLRM, format: str | RowFormat) -> None:
        super().__init__()
        self.rows_group = dist.new_group(group_desc="rows")
        self._format = format
        *hidden, last = (layer for layer in model.top if isinstance(layer, nn.Linear))
        self.parts = nn.ModuleList(map(_columns, hidden))
        # Call a bound method, because DDP would average the gradients of a submodule.
        model.top = nn.Sequential(_Call(self._split), last)
        self.mlps = model

    def close(self) -> None:
        """Destroy the process group and its threads. Collective."""
        dist.destroy_process_group(self.rows_group)

    def forward(self, ints: Tensor, ids: Tensor) -> Tensor:
        """Return logits [batch] for `ints` float32 [batch, 13], `ids` int32 [batch, tables]."""
        return self.mlps(ints, ids)

    def _split(self, x: Tensor) -> Tensor:
        """Compute the last hidden layer's features for this rank's samples."""
        ranks, settings = dist.get_world_size(), {"format": self._format, "group": self.rows_group}
        samples = [len(x)] * ranks
        x = all_to_all_rows(x.repeat(ranks, 1), samples, samples, **settings)
        for part, following in pairwise([*self.parts, None]):
            x = part(x).relu()
            if following is not None:
                x = all_gather_rows(x, [part.out_features] * ranks, **settings)
        received = all_to_all_rows(x, samples, samples, **settings)
        return torch.cat(received.split(samples), 1)


class _Call(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _columns(layer: nn.Linear) -> nn.Linear:
    """A layer with this rank's share of the output features of `layer`."""
    ranks = dist.get_world_size()
    if layer.out_features % ranks:
        rule = f"--ranks must divide {layer.out_features}, the width of a hidden layer"
        raise UsageError(f"{rule}, with --parallel columns, got {ranks}")
    part = nn.Linear(layer.in_features, layer.out_features // ranks)
    own = slice(dist.get_rank() * part.out_features, (dist.get_rank() + 1) * part.out_features)
    for name, weight in part.named_parameters():
        weight.data.copy_(layer.get_parameter(name)[own])
        weight.register_hook(lambda grad: grad / ranks)
    return part
