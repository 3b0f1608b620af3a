"""Autograd: gradients of the row ops, refused uses, version counters of written tensors.

The row ops are linear once the positions are chosen, and their gradients are the row ops again:
pack and gather go back through unpack, unpack through gather, always at the same positions. So the
backward message is k values per row and no positions (DCT, arXiv 2010.08899: one mask, both ways).
Quantized rows have no gradient, because their bytes are integers.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from . import checks
from ._schemas import OPS, library


def _save_width(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, positions = inputs[0], output[1] if isinstance(output, tuple) else inputs[1]
    ctx.save_for_backward(positions)
    ctx.width, ctx.dtype = x.shape[1], x.dtype


def _save_k(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, positions, _, _ = inputs
    ctx.save_for_backward(positions)
    ctx.k, ctx.dtype = values.shape[1], values.dtype


# Incoming gradients may be expanded views (of a sum, say): the ops take contiguous tensors.
def _row_pack_backward(ctx: Any, grad_values: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    (positions,) = ctx.saved_tensors
    unpack = torch.ops.dct.row_unpack.default
    return unpack(grad_values.contiguous(), positions, ctx.width, ctx.dtype), None, None


def _row_gather_backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor, None, None, None]:
    (positions,) = ctx.saved_tensors
    unpack = torch.ops.dct.row_unpack.default
    return unpack(grad_values.contiguous(), positions, ctx.width, ctx.dtype), None, None, None


def _row_unpack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (positions,) = ctx.saved_tensors
    gather = torch.ops.dct.row_gather.default
    return gather(grad.contiguous(), positions, ctx.k, ctx.dtype), None, None, None


def _differentiate(name: str, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
    """Register a formula, not by torch.library.register_autograd, which torch.func refuses.

    There the dispatcher calls this kernel once per transform, so it differentiates one level.
    """
    op = getattr(torch.ops.dct, name).default

    def below(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        with torch.enable_grad():  # which autograd has ended here, for a transform further out
            output = below(keyset, *args)
        setup(ctx, args, output)
        return output

    def gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *backward(ctx, *grads)

    members = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    function: Any = type(f"dct_{name}", (_SingleLevelFunction,), members)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return below(keyset, *args)
        with enable_single_level_autograd_function():
            return function.apply(keyset, *args)

    library.impl(name, kernel, "Autograd", with_keyset=True)


for _name, _backward, _setup in (
    ("row_pack", _row_pack_backward, _save_width),
    ("row_gather", _row_gather_backward, _save_width),
    ("row_unpack", _row_unpack_backward, _save_k),
):
    _differentiate(_name, _backward, _setup)


def _has_tangent(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    # Inside torch.func.jvp, whose wrapped tensors do not show theirs to an op.
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)
    return wrapped or forward_ad.unpack_dual(value).tangent is not None


def _guard(name: str) -> None:
    """Before the kernel: refuse uses that autograd would silently get wrong, and count writes.

    Torch asks a formula about forward mode only if a tensor requires grad, and it does not know
    which arguments an op made by define + impl writes.
    """
    op = getattr(torch.ops.dct, name).default  # which also makes dir(torch.ops.dct) list it
    arguments = op._schema.arguments
    written = [
        index
        for index, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def guarded(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            for argument, value in zip(arguments, args, strict=False):
                if _has_tangent(value):
                    rule = "no tangent, because the op has no forward-mode derivative"
                    checks.fail(name, argument.name, rule, "one", verb="have")
        for index in written:
            if args[index] is None:
                continue
            if args[index].requires_grad and torch.is_grad_enabled():
                rule = "require grad outside torch.no_grad(), because the op writes to it"
                checks.fail(name, arguments[index].name, rule, "requires_grad=True", verb="not")
            torch.autograd.graph.increment_version(args[index])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            below = keyset & torch._C._after_ADInplaceOrView_keyset
            return op.redispatch(below, *args, **kwargs)

    def refuse_vmap(
        info: object, in_dims: tuple[int | None, ...], *args: object, **kwargs: object
    ) -> NoReturn:
        batched = next(index for index, dim in enumerate(in_dims) if dim is not None)
        rule = "a single tensor, because torch.vmap cannot batch an op that writes to it"
        checks.fail(name, arguments[batched].name, rule, "a batch")

    library.impl(name, guarded, "ADInplaceOrView", with_keyset=True)
    if written:
        torch.library.register_vmap(f"dct::{name}", refuse_vmap, lib=library)


for _name in OPS:
    _guard(_name)
