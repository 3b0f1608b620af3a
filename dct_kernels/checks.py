"""Argument checks of the ops. The message is `dct::<op>: <arg> must <rule>, got <value>`.

The public functions, the Python backends and packages that use the ops share these checks.
torch.compile traces the metadata checks. `memory` is not traced, because it needs addresses.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import NoReturn, ParamSpec, TypeVar

import torch

from . import _torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32, INT32, UINT8 = (torch.float32,), (torch.int32,), (torch.uint8,)


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def names_keywords(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a function to raise a clear error for keyword-only arguments passed by position."""
    parameters = inspect.signature(function).parameters.values()
    positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    op = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if len(args) > positional:
            given = zip(keywords, args[positional:], strict=False)
            rule = ", ".join(f"{name}={shown(value)}" for name, value in given)
            rule = f"given by keyword (write {rule})"
            fail(op, keywords[0], rule, "it by position", TypeError)
        return function(*args, **kwargs)

    return checked


def fail(
    op: str, arg: str, rule: str, got: object, error: type[Exception] = ValueError, verb: str = "be"
) -> NoReturn:
    got = _name(got) if isinstance(got, torch.dtype) else got
    raise error(f"dct::{op}: {arg} must {verb} {rule}, got {got}")


def require_type(
    op: str, arg: str, value: object, kind: type | tuple[type, ...], rule: str
) -> None:
    """Check that `value` is of this type. `rule` describes the type in words."""
    if not isinstance(value, kind):
        fail(op, arg, rule, shown(value), TypeError)


def require_int(op: str, arg: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        fail(op, arg, "an integer", shown(value), TypeError)
    if value < low or value > high:
        fail(op, arg, f"in [{low}, {high}]", value)


def require_number(op: str, arg: str, value: object) -> None:
    if not isinstance(value, (float, int, torch.SymFloat)) or isinstance(value, bool):
        fail(op, arg, "a number", shown(value), TypeError)


def require_density(op: str, density: float) -> None:
    require_number(op, "density", density)
    if not 0 < density <= 1:  # also false for NaN
        fail(op, "density", "in (0, 1]", f"{float(density):.9g}")


def require_dtype(op: str, arg: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    if not isinstance(dtype, torch.dtype):
        fail(op, arg, either([str(one) for one in allowed]), shown(dtype), TypeError)
    if dtype not in allowed:
        fail(op, arg, either([_name(one) for one in allowed]), dtype, TypeError)


def require_choice(op: str, arg: str, value: str, choices: tuple[str, ...]) -> None:
    require_type(op, arg, value, str, "a string")
    if value not in choices:
        fail(op, arg, either([repr(choice) for choice in choices]), repr(value))


def require_device(op: str, device: torch.device | str) -> torch.device:
    """`device` as a torch.device."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        fail(op, "device", "a torch.device or its name", repr(device))


def require_dense(op: str, arg: str, tensor: torch.Tensor) -> None:
    require_type(op, arg, tensor, torch.Tensor, "a tensor")
    # Dynamo cannot read the layout of a tensor in the backward pass of an autograd.Function.
    if not torch.compiler.is_compiling() and tensor.layout is not torch.strided:
        fail(op, arg, "dense", str(tensor.layout).removeprefix("torch."), TypeError)


def require_tensor(
    op: str,
    arg: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    dims: tuple[int, ...] = (1,),
    like: tuple[str, torch.Tensor] | None = None,
) -> None:
    """Check that `tensor` is contiguous, on the device of `like`, with allowed dtype and dims."""
    require_dense(op, arg, tensor)
    if tensor.dtype not in dtypes:
        fail(op, arg, either([_name(dtype) for dtype in dtypes]), tensor.dtype, TypeError)
    if tensor.dim() not in dims:
        fail(op, arg, " or ".join(f"{dim}-D" for dim in dims), f"{tensor.dim()}-D")
    if like is not None and tensor.device != like[1].device:
        fail(op, arg, f"on {like[1].device} like {like[0]}", tensor.device)
    if not tensor.is_contiguous():
        fail(op, arg, "contiguous", f"strides {tuple(tensor.stride())}")


def is_plain(value: object) -> bool:
    """Whether `value` is a dense torch.Tensor or Parameter with memory, and not a subclass."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return plain and not (value.is_meta or value.is_nested or value.is_quantized)


def require_plain(op: str, arg: str, value: object) -> None:
    require_type(op, arg, value, torch.Tensor, "a tensor")
    if not is_plain(value):
        got = f"{value.layout} {type(value).__name__} on {value.device}"  # type: ignore[attr-defined]
        fail(op, arg, "a plain dense tensor", got, TypeError)


def require_numel(op: str, arg: str, tensor: torch.Tensor, numel: int, why: str) -> None:
    """Check that `tensor` has `numel` elements. `why` ends the rule, as in "like x"."""
    if tensor.numel() != numel:
        elements = "1 element" if numel == 1 else f"{numel} elements"
        fail(op, arg, f"{elements} {why}", tensor.numel(), verb="have")


def require_scale(
    op: str, arg: str, scale: torch.Tensor | None, like: tuple[str, torch.Tensor]
) -> None:
    if scale is not None:
        require_tensor(op, arg, scale, FLOAT32, (0, 1), like)
        if scale.numel() != 1:
            fail(op, arg, "1 element", scale.numel(), verb="have")


def memory(
    op: str,
    written: Mapping[str, torch.Tensor],
    read: Mapping[str, torch.Tensor | None],
    aligned: Sequence[str] = (),
) -> None:
    """Check for overlaps with `written` tensors, and that `aligned` tensors are 16-byte aligned."""
    given = [(name, tensor) for name, tensor in {**written, **read}.items() if tensor is not None]
    if torch.compiler.is_compiling() or not all(_has_memory(tensor) for _, tensor in given):
        return
    spans = []
    for name, tensor in given:
        start, nbytes = tensor.data_ptr(), tensor.nbytes
        if name in aligned and start % 16:
            fail(op, name, "16-byte aligned", f"address % 16 = {start % 16}")
        if nbytes:
            spans.append((name, tensor.device, start, start + nbytes))
    for index, (name, device, start, end) in enumerate(spans):
        if name not in written:
            break  # this tensor and the later ones are only read
        for other, other_device, other_start, other_end in spans[index + 1 :]:
            shared = min(end, other_end) - max(start, other_start)
            if shared > 0 and device == other_device:
                fail(op, other, f"no memory with {name}", f"{shared} bytes", verb="share")


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for meta tensors, fake tensors, and tensors in transforms such as torch.vmap."""
    if tensor.is_meta or _torch.is_wrapped(tensor) or _torch.is_functional(tensor):
        return False
    # The type is compared first, because is_fake takes a microsecond.
    return type(tensor) is torch.Tensor or not _torch.is_fake(tensor)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shown(value: object) -> str:
    """Format a value for an error message: its repr if that is short, else the name of its type."""
    short = isinstance(value, (Number, str, torch.dtype, torch.device, type(None)))
    return repr(value) if short else type(value).__name__


def either(names: Sequence[str]) -> str:
    """Join names for a rule, with "or" before the last one."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
