"""Defines an op: its schema, the shapes of its results, its checks and its autograd.

Schemas are defined in Python, so the ops exist and run eagerly without a compiled library. Sizes
are SymInt, because torch.compile would recompile for every new value of a plain int.

The Python backends run after the same checks as the public functions. The compiled backends repeat
the checks that prevent invalid memory accesses, with short messages (csrc/bindings/ops.cpp).

For fixed positions, row_pack, row_gather and row_unpack are linear. row_unpack computes the
gradients of row_pack and row_gather, and row_gather computes the gradient of row_unpack, at the
positions of the forward pass. So messages of the backward pass have k values per row and no
positions. DCT (arXiv 2010.08899) also uses one mask in both directions. Quantized rows have no
gradient, because their bytes are integers.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _torch, checks
from ._torch import AFTER_INPLACE, BelowInplace, DispatchKeySet, Op

P = ParamSpec("P")
R = TypeVar("R")

# Kept alive, because a Library that is garbage-collected removes its registrations.
library = torch.library.Library("dct", "DEF")

SCHEMAS: list[str] = []
CHECKS: dict[str, Callable[..., Any]] = {}
OPS = CHECKS.keys()


def schemas_digest() -> str:
    """The digest of the schemas. A compiled library contains the digest at its build time."""
    return f"{zlib.crc32(' '.join(SCHEMAS).encode()):08x}"


def define(
    schema: str, fake: Callable[..., Any] = lambda *_: None, differentiable: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Define an op. The decorated function checks the arguments; the returned one also runs it."""

    def with_check(check: Callable[P, R]) -> Callable[P, R]:
        name = check.__name__
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        library.define(name + schema, tags=tags)
        SCHEMAS.append(name + schema)
        CHECKS[name] = check
        torch.library.register_fake(f"dct::{name}", fake, lib=library)
        run = getattr(torch.ops.dct, name).default  # this also adds the op to dir(torch.ops.dct)
        _guard(run)
        if differentiable:
            _differentiate(run)

        return checked(run, name)

    return with_check


def checked(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that checks the arguments of the op `name` and then calls `run`."""
    check = CHECKS[name]

    @functools.wraps(check)
    def checked_op(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return run(*args, **kwargs)

    return checked_op


def _differentiate(op: Op) -> None:
    """Register the gradient of a row op in its first argument."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, *args = inputs
        ctx.save_for_backward(output[1] if isinstance(output, tuple) else args[0])
        ctx.size, ctx.dtype = x.shape[1], x.dtype

    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        ops = torch.ops.dct
        gradient_op = ops.row_gather if op is ops.row_unpack.default else ops.row_unpack
        # The incoming gradient may be an expanded view, but the ops take contiguous tensors.
        result = gradient_op.default(grad.contiguous(), positions, ctx.size, ctx.dtype)
        return result, *[None] * (len(op._schema.arguments) - 1)

    torch.library.register_autograd(op, backward, setup_context=setup_context, lib=library)


def _guard(op: Op) -> None:
    """Reject calls for which autograd would be silently wrong, and increment version counters.

    Torch checks for a forward-mode formula only if a tensor requires grad. For an op
    defined with define and impl, torch does not detect which arguments the op writes to.
    """
    infos = [argument.alias_info for argument in op._schema.arguments]
    written = [i for i, info in enumerate(infos) if info is not None and info.is_write]
    redispatch = _torch.redispatch_of(op)

    def kernel(keyset: DispatchKeySet, *args: Any) -> Any:
        if _torch.forward_mode_is_on():
            _refuse_tangents(op, args)
        for index in written:
            tensor = args[index]
            if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
                rule = "require grad outside torch.no_grad(), because the op writes to it"
                _fail(op, index, rule, "requires_grad=True", "not")
        _torch.increment_versions([args[i] for i in written if args[i] is not None])
        with BelowInplace():
            return redispatch(keyset & AFTER_INPLACE, *args)

    library.impl(op, kernel, "ADInplaceOrView", with_keyset=True)


def _refuse_tangents(op: Op, args: tuple[Any, ...]) -> None:
    for index, value in enumerate(args):
        # Inside torch.func.jvp, tensors are wrapped and hide their tangents.
        if isinstance(value, Tensor) and (
            _torch.is_wrapped(value) or forward_ad.unpack_dual(value).tangent is not None
        ):
            rule = "no tangent, because the op has no forward-mode derivative"
            _fail(op, index, rule, "one", "have")


def _fail(op: Op, index: int, rule: str, got: str, verb: str) -> NoReturn:
    name = op.name().removeprefix("dct::")
    checks.fail(name, op._schema.arguments[index].name, rule, got, verb=verb)
