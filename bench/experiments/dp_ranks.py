"""Data-parallel training of several ranks in one process, for dp_density.py.

The ranks' gradients are found one after another, on one copy of the weights, and lie in one flat
tensor each, in the order in which backward finishes them: as DDP's one bucket holds them. What DDP
and its hook do with them then is done here without a network (in_process.py), so that weights are
those of real ranks, bit for bit (tests/bench/test_dp_density.py), at the cost of the arithmetic.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dct_parallel.wire import all_gather_bytes, all_reduce_bytes
from dlrm.modes import START_STEP
from topk import take_largest

from .in_process import Buckets

ERROR_STEPS = (10, 100, 1000)  # whose means are compared: squared error over squared norm


class Counts:
    """`sent`: bytes of the rank that sends most, so far; `payloads` that the first rank saw, and
    how many of them `overflowed`; `errors`: of mean gradients, at some steps."""

    sent = payloads = overflowed = 0
    errors: dict[int, float] | None = None

    def exchange(self, buckets: Buckets, tensors: Sequence[Tensor]) -> Tensor:
        """Their mean, compressed."""
        mean, result = buckets.mean(tensors)
        self.sent += buckets.plan.wire_bytes
        self.payloads += result.payloads
        self.overflowed += result.overflowed
        return mean


class Exchange(Counts):
    """What becomes of the ranks' gradients in a step.

    Args:
        shapes: of the parameters, in the order of the flat gradients.
        ranks: how many.
    """

    def __init__(self, shapes: Sequence[torch.Size], ranks: int) -> None:
        self.shapes = shapes
        self.sizes = [shape.numel() for shape in shapes]
        self.ranks = ranks
        self.step = 0
        self.errors = {}

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        """The mean of the ranks' gradients [numel], as every rank then has it."""
        mean = self.start(grads) if self.step < START_STEP else self.mean(grads)
        if self.step in ERROR_STEPS:
            true = sum(grads) / self.ranks
            self.errors[self.step] = ((mean - true).square().sum() / true.square().sum()).item()
        self.step += 1
        return mean

    def start(self, grads: Sequence[Tensor]) -> Tensor:
        """As `mean`, in the steps before compression."""
        return self.mean(grads)

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError

    def all_reduce(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The mean as a ring computes it in `dtype`: divided first, as DDP does."""
        mean = sum(tensor.to(dtype) / self.ranks for tensor in tensors)
        self.sent += all_reduce_bytes(mean.nbytes, self.ranks)
        return mean.float()


class Dense(Exchange):
    """All-reduce in `dtype`."""

    def __init__(self, shapes, ranks: int, dtype: torch.dtype) -> None:
        super().__init__(shapes, ranks)
        self.dtype = dtype

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        return self.all_reduce(grads, self.dtype)


class DCT(Exchange):
    """What `DCTState` does."""

    def __init__(
        self,
        shapes,
        ranks: int,
        density: float,
        format: str = "bfloat16",
        transport: str = "all_gather",
    ) -> None:
        super().__init__(shapes, ranks)
        self.buckets = Buckets(self.sizes, ranks, density, format, transport)

    def start(self, grads: Sequence[Tensor]) -> Tensor:
        return self.all_reduce(grads, torch.bfloat16)

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        return self.exchange(self.buckets, grads)


class TopK(Exchange):
    """The largest entries of all, with error feedback; float32 values and int32 positions."""

    def __init__(self, shapes, ranks: int, density: float) -> None:
        super().__init__(shapes, ranks)
        self.count = math.ceil(density * sum(self.sizes))
        self.residuals = [torch.zeros(sum(self.sizes)) for _ in range(ranks)]

    def start(self, grads: Sequence[Tensor]) -> Tensor:
        return self.all_reduce(grads, torch.bfloat16)

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        mean = torch.zeros_like(grads[0])
        for residual, grad in zip(self.residuals, grads, strict=True):
            residual += grad
            values, index = take_largest(residual, self.count)
            mean.index_add_(0, index, values / self.ranks)
        self.sent += all_gather_bytes(8 * self.count, self.ranks)
        return mean


class PowerSGD(Exchange):
    """Rank 1 with error feedback and warm start (arXiv 1905.13727), as torch's hook has it.

    A matrix is compressed where that halves its elements at least; the rest goes dense.
    """

    def __init__(self, shapes, ranks: int) -> None:
        super().__init__(shapes, ranks)
        self.residuals = [torch.zeros(sum(self.sizes)) for _ in range(ranks)]
        # The vectors that the hook starts from, too: it takes matrices of one shape together.
        generator = torch.Generator().manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        self.q: dict[int, Tensor] = {}  # of what is compressed
        for index in sorted(range(len(shapes)), key=lambda index: shapes.index(shapes[index])):
            size, rows = self.sizes[index], shapes[index][0]
            columns = size // rows
            if len(shapes[index]) > 1 and 2 * (rows + columns) < size:
                self.q[index] = torch.randn(columns, generator=generator)

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        if self.step < START_STEP:
            return self.all_reduce(grads, torch.float32)
        # What is averaged whole leaves differences that cancel in the next mean.
        owed = [residual + grad for residual, grad in zip(self.residuals, grads, strict=True)]
        parts = zip(*(tensor.split(self.sizes) for tensor in owed), strict=True)
        mean = torch.cat([self._mean_of(index, part) for index, part in enumerate(parts)])
        self.residuals = [tensor - mean for tensor in owed]
        return mean

    def _mean_of(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        if index not in self.q:
            return self.all_reduce(parts, torch.float32)
        matrices = [part.view(self.shapes[index][0], -1) for part in parts]
        p = self.all_reduce([matrix @ self.q[index] for matrix in matrices], torch.float32)
        p /= p.norm() + 1e-8
        self.q[index] = self.all_reduce([matrix.t() @ p for matrix in matrices], torch.float32)
        return torch.outer(p, self.q[index]).flatten()


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
    make_exchange: Callable[[Sequence[torch.Size], int], Exchange],
    step_weights: Callable[[int], None],
    steps: int,
) -> Iterator[tuple[float, Counts]]:
    """(mean loss of the ranks, what has been sent so far) of every step.

    Args:
        model: trained in place.
        loss_of: of the model and a batch.
        batches: of every rank.
        make_exchange: of the parameters' shapes and the number of ranks.
        step_weights: called with the step's number once gradients are there.
    """
    first = [next(own) for own in batches]
    order = finishing_order(model, loss_of(model, first[0]))
    shapes = [parameter.shape for parameter in order]
    exchange = make_exchange(shapes, len(batches))
    grads = torch.zeros(len(batches), sum(exchange.sizes))
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
