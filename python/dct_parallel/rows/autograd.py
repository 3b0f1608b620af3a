"""Functions of a tensor whose gradient is not the derivative, but sent by a message."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TensorFunction = Callable[[Tensor], Tensor]


def with_gradient(x: Tensor, forward: TensorFunction, backward: TensorFunction) -> Tensor:
    """forward(x). If the gradient of that is g, the gradient of `x` is backward(g).

    Neither function is differentiated, so there is no second derivative; under no_grad `backward`
    is not called. The graph keeps `backward` and all that it refers to alive, so it must refer to a
    process group by a `GroupForBackward`.
    """
    y: Tensor = _WithGradient.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return y


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: TensorFunction, backward: TensorFunction) -> Tensor:
        ctx.back = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None
