"""Data-parallel training of several ranks in one process, for dp_density.py.

The ranks' gradients are found one after another, on one copy of the weights, and lie in one flat
tensor each, in the order in which backward finishes them: as DDP's one bucket holds them. What DDP
and its hook do with them then is done here by the same functions without a network, so that weights
are those of real ranks, bit for bit (tests/dlrm/test_dp_density.py), at the cost of the arithmetic.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dct_bench.topk import take_largest
from dct_dlrm.modes import START_STEP
from dct_kernels import payload_info
from dct_kernels.layout import range_bounds
from dct_parallel import Compressor
from dct_parallel.compressor import HEADROOM
from dct_parallel.exchange import quantized
from dct_parallel.exchange.codec import Codec
from dct_parallel.wire import all_gather_bytes, all_reduce_bytes

CPU = torch.device("cpu")


class Counts:
    """`sent`: bytes of a rank so far, counted; `payloads` of all ranks, and which `overflowed`."""

    sent = payloads = overflowed = 0

    def note(self, payloads: Tensor) -> None:
        """What all ranks packed in a step, [ranks, ..., nbytes]."""
        rows = payloads.view(-1, payloads.shape[-1])
        self.payloads += len(rows)
        self.overflowed += sum(payload_info(row).overflow for row in rows)


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

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        """The mean of the ranks' gradients [numel], as every rank then has it."""
        mean = self.start(grads) if self.step < START_STEP else self.mean(grads)
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
    """What `DCTState` does, by its own compressor; `settings` are the compressor's."""

    def __init__(self, shapes, ranks: int, density: float, **settings) -> None:
        super().__init__(shapes, ranks)
        self.compressors = compressors(self.sizes, ranks, density, **settings)

    def start(self, grads: Sequence[Tensor]) -> Tensor:
        return self.all_reduce(grads, torch.bfloat16)

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        ranks = zip(self.compressors, grads, strict=True)
        payloads = torch.stack([compressor.pack(grad) for compressor, grad in ranks])
        self.note(payloads)
        self.sent += self.payload_bytes(payloads)
        mean = torch.empty_like(grads[0])
        status = self.compressors[0].unpack(payloads, mean)
        assert not status.any()
        return mean

    def payload_bytes(self, payloads: Tensor) -> int:
        """What the rank that sends most sends of payloads [ranks, ...], counted."""
        return all_gather_bytes(payloads[0].nbytes, self.ranks)


class ReduceScatter(DCT):
    """As `DCT`, two-way: every rank owns a range of the tensor. Its payloads of all ranks go to the
    owner, who compresses their mean once more, with a residual of its own, and sends that to all.
    """

    def __init__(self, shapes, ranks: int, density: float) -> None:
        Exchange.__init__(self, shapes, ranks)
        numel = sum(self.sizes)
        self.ranges = [range_bounds(numel, ranks, rank) for rank in range(ranks)]
        bounds = [0, *(high for _, high in self.ranges)]
        self.compressors = [Compressor(numel, bounds, density, ranges=ranks) for _ in range(ranks)]
        room = self.compressors[0].capacity
        self.owners = [
            Compressor(high - low, [0, high - low], density, capacity=room)
            for low, high in self.ranges
        ]

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        mean = super().mean(grads)
        for (low, high), owner in zip(self.ranges, self.owners, strict=True):
            if low < high:
                payload = owner.pack(mean[low:high])
                status = owner.unpack(payload.unsqueeze(0), mean[low:high])
                assert not status.any()
        return mean

    def payload_bytes(self, payloads: Tensor) -> int:
        owning = sum(low < high for low, high in self.ranges)
        # Whoever owns nothing sends to all owners; and everybody's result goes to all others.
        to_owners, to_everybody = min(owning, self.ranks - 1), self.ranks - 1
        return (to_owners + to_everybody) * payloads[0, 0].nbytes


def compressors(
    sizes: Sequence[int], ranks: int, density: float, headroom: float = HEADROOM, **settings
) -> list[Codec]:
    """Every rank's, as `DCTState` has them in one bucket of these sizes, and `DCTAverager`; the
    capacity is `headroom` * density * numel."""
    numel = sum(sizes)
    if settings.get("value_dtype") in quantized.FORMATS:
        assert density == 1, "in few bits every entry is sent"
        format = settings["value_dtype"]
        return [quantized.QuantizedRows(numel, format, 1, None, CPU) for _ in range(ranks)]
    settings["capacity"] = max(1, min(numel, math.ceil(headroom * density * numel)))
    return [Compressor(numel, [0, numel], density, **settings) for _ in range(ranks)]


def owners(numel: int, ranks: int, value_dtype: str) -> list[tuple[slice, Codec]]:
    """(range, codec) of the ranks that own one with "reduce_scatter", every entry in few bits."""
    ranges = [range_bounds(numel, ranks, rank) for rank in range(ranks)]
    longest = ranges[0][1]
    return [
        (slice(low, high), quantized.QuantizedRows(high - low, value_dtype, 1, longest, CPU))
        for low, high in ranges
        if low < high
    ]


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
