"""Simulates FSDP2 between several ranks in one process, for dp_density.py.

The ranks share one copy of the weights. Before each step, the weights are replaced by the values
that ranks would gather. After the backward passes, the gradients are replaced by the means that the
owners of shards would compute. Messages are bitwise equal to the messages of `compress_fully_shard`
(test_dp_density.py). Each block of the model is a wrapped module, and all other parameters form one
more wrapped module. Each wrapped module is gathered once per step.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dct_parallel.collectives import all_gather_bytes
from dct_parallel.fsdp2.messages import message_layout

from .dp_ranks import Counts

WEIGHTS = ("bfloat16", "int8")  # formats
GRADIENTS = (*WEIGHTS, "int4")


class _Unit:
    """A wrapped module. Its parameters are gathered together."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], ranks: int, weights: str, gradients: str
    ) -> None:
        self.parameters, self.ranks = parameters, ranks
        self.numels = [-(-len(p) // ranks) * p[0].numel() for p in parameters]  # entries per shard
        sent = tuple((numel, p.dim() < 2) for p, numel in zip(parameters, self.numels, strict=True))
        cpu = torch.device("cpu")
        self.gather = message_layout(sent, weights, cpu)
        self.reduce = message_layout(sent, gradients, cpu)
        self.grads: list[Tensor] = []  # the gradients of each rank

    def shards(self, tensors: Sequence[Tensor]) -> Tensor:
        """Split tensors with the parameters' shapes into shards [ranks, numel]."""
        sizes = zip(tensors, self.numels, strict=True)
        padded = [pad(t.flatten(), (0, self.ranks * numel - t.numel())) for t, numel in sizes]
        return torch.cat([t.view(self.ranks, -1) for t in padded], 1)

    def whole(self, shards: Tensor) -> list[Tensor]:
        """Join shards into tensors with the parameters' shapes."""
        parts = zip(shards.split(self.numels, 1), self.parameters, strict=True)
        return [part.flatten()[: p.numel()].view_as(p) for part, p in parts]

    def gathered(self) -> Tensor:
        """The weights [ranks, numel] that each rank receives."""
        shards = self.shards([p.detach() for p in self.parameters])
        got = torch.empty_like(shards)
        self.gather.unpack(self.gather.pack(shards), got)
        return got

    def reduced(self) -> Tensor:
        """The mean gradients [ranks, numel], as the owners of the shards compute them."""
        means = torch.empty_like(self.grads[0])
        for owner, out in enumerate(means):
            messages = self.reduce.pack(torch.stack([grads[owner] for grads in self.grads]))
            self.reduce.sum(messages, out, 1 / self.ranks)
        self.grads.clear()
        return means


class Shards(Counts):
    """Exchanges weights and gradients between the shards of a model.

    Args:
        weights, gradients: formats of `compress_fully_shard`.
    """

    def __init__(self, model: nn.Module, ranks: int, weights: str, gradients: str) -> None:
        wrapped = [list(block.parameters()) for block in getattr(model, "blocks", ())]
        inside = {parameter for block in wrapped for parameter in block}
        rest = [parameter for parameter in model.parameters() if parameter not in inside]
        self.units = [_Unit(module, ranks, weights, gradients) for module in (*wrapped, rest)]
        parts = [
            layout.nbytes(torch.float32) for u in self.units for layout in (u.gather, u.reduce)
        ]
        self.step_bytes = sum(all_gather_bytes(part, ranks) for part in parts)

    def means(self, losses: Sequence[Callable[[], Tensor]]) -> list[float]:
        """Return the loss of each rank, and set the gradients to their means over ranks."""
        values = []
        saved = [[p.data for p in unit.parameters] for unit in self.units]
        for unit in self.units:
            for p, gathered in zip(unit.parameters, unit.whole(unit.gathered()), strict=True):
                p.data, p.grad = gathered.clone(), None
        for loss_of in losses:
            loss = loss_of()
            loss.backward()
            values.append(loss.item())
            for unit in self.units:
                unit.grads.append(unit.shards([p.grad for p in unit.parameters]))
                for p in unit.parameters:
                    p.grad = None
        for unit, weights in zip(self.units, saved, strict=True):
            means = unit.whole(unit.reduced())
            for p, weight, mean in zip(unit.parameters, weights, means, strict=True):
                p.data, p.grad = weight, mean.clone()
        self.sent += self.step_bytes
        return values


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, object], Tensor],
    batches: Sequence[Iterator],
    shards: Shards,
    step_weights: Callable[[int], None],
    steps: int,
) -> Iterator[tuple[float, Counts]]:
    """Like `dp_ranks.train`, with sharded weights."""
    for step in range(steps):
        losses = shards.means([lambda each=each: loss_of(model, next(each)) for each in batches])
        step_weights(step)
        yield sum(losses) / len(losses), shards
