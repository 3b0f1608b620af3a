"""Simulates data-parallel training of several ranks in one process, for dp_density.py.

The gradients of the ranks are computed one after another with one copy of the weights. Each rank's
gradients are one flat tensor, in the order in which backward computes them, as in DDP with one
bucket. in_process.py exchanges them without a network. The resulting weights are bitwise equal to
the weights of real ranks (tests/bench/test_dp_density.py).
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dct_parallel.collectives import all_reduce_bytes
from dlrm.modes import START_STEP

from .in_process import Buckets


class Counts:
    """A base class that counts sent bytes. `sent` is the count of the rank that sends most."""

    sent = 0

    def exchange(self, buckets: Buckets, tensors: Sequence[Tensor]) -> Tensor:
        """Compress and exchange the tensors of the ranks. Return their mean."""
        self.sent += buckets.plan.wire_bytes
        return buckets.mean(tensors)


class Dense(Counts):
    """Averages the ranks' gradients like an all-reduce in `dtype`.

    Args:
        shapes: shapes of the parameters, in the order of the flat gradients.
    """

    def __init__(self, shapes: Sequence[torch.Size], ranks: int, dtype: torch.dtype) -> None:
        self.ranks, self.dtype = ranks, dtype

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        """The mean of the ranks' gradients [numel]."""
        mean = sum(tensor.to(self.dtype) / self.ranks for tensor in grads)  # as in DDP
        self.sent += all_reduce_bytes(mean.nbytes, self.ranks)
        return mean.float()


class DCT(Dense):
    """Averages gradients as `DCTState` does; the first START_STEP steps use bfloat16."""

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        ranks: int,
        density: float,
        format: str = "bfloat16",
        transport: str = "all_gather",
    ) -> None:
        super().__init__(shapes, ranks, torch.bfloat16)
        sizes = [shape.numel() for shape in shapes]
        self.buckets = Buckets(sizes, ranks, density, format, transport)
        self.step = 0

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        self.step += 1
        if self.step <= START_STEP:
            return super().__call__(grads)
        return self.exchange(self.buckets, grads)


class PowerSGD(Dense):
    """PowerSGD (arXiv 1905.13727) as in torch's hook, for matrix ranks above 2.

    A matrix is compressed if this more than halves the number of elements. Other gradients, and all
    gradients of the first `start` steps, are averaged in float32.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], ranks: int, rank: int, start: int = START_STEP
    ) -> None:
        super().__init__(shapes, ranks, torch.float32)
        self.shapes, self.start, self.step = shapes, start, 0
        self.sizes = [shape.numel() for shape in shapes]
        self.residuals = [torch.zeros(sum(self.sizes)) for _ in range(ranks)]
        # The same random values as in the hook, which groups matrices by shape.
        generator = torch.Generator().manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        self.q: dict[int, Tensor] = {}  # only for compressed matrices
        for index in sorted(range(len(shapes)), key=lambda index: shapes.index(shapes[index])):
            rows, columns = shapes[index][0], self.sizes[index] // shapes[index][0]
            least = min(rows, columns, rank)
            if 2 * (rows + columns) * least < self.sizes[index]:
                self.q[index] = torch.randn(columns, least, generator=generator)

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        self.step += 1
        if self.step <= self.start:
            return super().__call__(grads)
        pending = [kept + grad for kept, grad in zip(self.residuals, grads, strict=True)]
        parts = zip(*(tensor.split(self.sizes) for tensor in pending), strict=True)
        mean = torch.cat([self._mean(index, each) for index, each in enumerate(parts)])
        self.residuals = [tensor - mean for tensor in pending]
        return mean

    def _mean(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        if index not in self.q:
            return super().__call__(parts)
        matrices = [part.view(self.shapes[index][0], -1) for part in parts]
        q, _ = torch.linalg.qr(self.q[index])
        p, _ = torch.linalg.qr(super().__call__([matrix @ q for matrix in matrices]))
        self.q[index] = super().__call__([matrix.t() @ p for matrix in matrices])
        return (p @ self.q[index].t()).flatten()


def finishing_order(model: nn.Module, loss: Tensor) -> list[nn.Parameter]:
    """The parameters in the order in which backward computes their gradients. Resets gradients."""
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
    make_exchange: Callable[[Sequence[torch.Size], int], Dense],
    step_weights: Callable[[int], None],
    steps: int,
) -> Iterator[tuple[float, Counts]]:
    """Train `model` in place. Yield (mean loss over ranks, exchange object) for each step.

    Args:
        loss_of: computes the loss from the model and a batch.
        batches: the batches of each rank.
        make_exchange: makes the exchange from the parameters' shapes and the number of ranks.
        step_weights: called with the step number after the gradients are averaged.
    """
    first = [next(rank_batches) for rank_batches in batches]
    order = finishing_order(model, loss_of(model, first[0]))
    exchange = make_exchange([parameter.shape for parameter in order], len(batches))
    grads = torch.zeros(len(batches), sum(parameter.numel() for parameter in order))
    for step in range(steps):
        losses = []
        for rank, rank_batches in enumerate(batches):
            grads[rank].zero_()
            _point(order, grads[rank])
            batch = next(rank_batches) if step else first[rank]
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
        _point(order, exchange(list(grads)))
        step_weights(step)
        yield sum(losses) / len(losses), exchange


def _point(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Set the gradients of `parameters` to views of `flat`."""
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, grad in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = grad.view_as(parameter)
