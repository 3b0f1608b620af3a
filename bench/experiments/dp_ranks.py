"""Data-parallel training of several ranks in one process, for dp_density.py.

The gradients of the ranks are computed one after another on one copy of the weights. Each rank's
gradients are one flat tensor in the order in which backward finishes them, as in DDP's one bucket.
The exchange runs without a network (in_process.py). The weights are those of real ranks, bit for
bit (tests/bench/test_dp_density.py).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from bench.network.methods import START_STEP
from dct_parallel.collectives import all_reduce_bytes

from .in_process import Buckets


class Counts:
    """What is counted of an exchange: `sent`, the bytes of the rank that sends most, so far."""

    sent = 0

    def exchange(self, buckets: Buckets, tensors: Sequence[Tensor]) -> Tensor:
        """The mean of the ranks' tensors, compressed."""
        self.sent += buckets.plan.wire_bytes
        return buckets.mean(tensors)


class Dense(Counts):
    """The ranks' gradients by all-reduce in `dtype`.

    Args:
        sizes: of the parameters, in the order of the flat gradients.
    """

    def __init__(self, sizes: Sequence[int], ranks: int, dtype: torch.dtype) -> None:
        self.ranks, self.dtype = ranks, dtype

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        """The mean of the ranks' gradients [numel]."""
        mean = sum(tensor.to(self.dtype) / self.ranks for tensor in grads)  # divided first, as DDP
        self.sent += all_reduce_bytes(mean.nbytes, self.ranks)
        return mean.float()


class DCT(Dense):
    """What `DCTState` does, after START_STEP steps in bfloat16."""

    def __init__(
        self,
        sizes: Sequence[int],
        ranks: int,
        density: float,
        format: str = "bfloat16",
        transport: str = "all_gather",
    ) -> None:
        super().__init__(sizes, ranks, torch.bfloat16)
        self.buckets = Buckets(sizes, ranks, density, format, transport)
        self.step = 0

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        self.step += 1
        if self.step <= START_STEP:
            return super().__call__(grads)
        return self.exchange(self.buckets, grads)


def finishing_order(model: nn.Module, loss: Tensor) -> list[nn.Parameter]:
    """The parameters as backward finishes them. Their gradients are None afterwards."""
    order: list[nn.Parameter] = []
    hooks = [p.register_post_accumulate_grad_hook(order.append) for p in model.parameters()]
    loss.backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return order


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, object], Tensor],
    batches: Sequence[Iterator],
    make_exchange: Callable[[Sequence[int], int], Dense],
    step_weights: Callable[[int], None],
    steps: int,
) -> Iterator[tuple[float, Counts]]:
    """(mean loss of the ranks, the exchange) of every step.

    Args:
        model: trained in place.
        loss_of: of the model and a batch.
        batches: of every rank.
        make_exchange: of the sizes of the parameters and the number of ranks.
        step_weights: called with the step's number once gradients are there.
    """
    first = [next(own) for own in batches]
    order = finishing_order(model, loss_of(model, first[0]))
    sizes = [parameter.numel() for parameter in order]
    exchange = make_exchange(sizes, len(batches))
    grads = torch.zeros(len(batches), sum(sizes))
    for step in range(steps):
        losses = []
        for rank, own in enumerate(batches):
            grads[rank].zero_()
            _point(order, grads[rank])
            batch = next(own) if step else first[rank]
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
        _point(order, exchange(list(grads)))
        step_weights(step)
        yield sum(losses) / len(losses), exchange


def _point(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Let the gradients of `parameters` be views of `flat`."""
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, grad in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = grad.view_as(parameter)
