"""Tables of the contents of saved states, and the one function that checks a state against them.

A table has a row per key: the rule of its value, in words and as code, and its default if a state
leaves it out. All of a state is checked before anything is assigned from it.
"""

import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dct_kernels import checks

REQUIRED = object()
_LAST = 2**31 - 1  # compressors count steps in int32


class Field(NamedTuple):
    """A row of a table.

    Attributes:
        rule: what a value must be, as errors say it.
        flaw: gives the error's text for a value that breaks the rule, else None.
        default: of a missing value; None if it has none.
    """

    rule: str
    flaw: Callable[[Any], object]
    default: Any = REQUIRED


def checked(op: str, values: object, table: dict[str, Field], of: str = "") -> dict[str, Any]:
    """The values that the table has a row for, and its defaults; others are left out.

    Args:
        op: for errors.
        values: a dict, or else an error.
        of: the owner of the values, for errors: "" or " of ...".

    Raises:
        TypeError: `values` is not a dict.
        ValueError: a value is missing, or breaks its rule; the text names it.
    """
    if not isinstance(values, dict):
        checks.fail(op, f"state{of}", "a dict", type(values).__name__, TypeError)
    found = {}
    for key, field in table.items():
        if key in values:
            value = values[key]
            flaw = field.flaw(value)
            if flaw is not None:
                checks.fail(op, f"{key}{of}", field.rule, flaw)
            found[key] = value.detach() if isinstance(value, Tensor) else value
        elif field.default is REQUIRED:
            checks.fail(op, f"{key}{of}", field.rule, "nothing")
        elif field.default is not None:
            found[key] = field.default
    return found


def integer(low: int, high: int = _LAST, default: Any = REQUIRED) -> Field:
    rule = f"an integer in [{low}, {high}]" if low < high else f"{low}"
    return _field(rule, lambda value: _is_number(value, int) and low <= value <= high, default)


def tensor(shape: Sequence[int], default: Any = REQUIRED) -> Field:
    """A float32 tensor of finite numbers, on any device."""

    def flaw(value: object) -> object:
        if type(value) is not Tensor:  # of a DTensor the local part is checked
            return type(value).__name__
        if value.layout is not torch.strided or value.is_meta:
            return f"one on {value.device}, {value.layout}"
        if value.dtype != torch.float32 or value.shape != torch.Size(shape):
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        wrong = value[~value.isfinite()]
        return wrong[0].item() if len(wrong) else None

    return Field(f"a float32 {list(shape)} tensor of finite numbers", flaw, default)


def at_most_one(of: Field) -> Field:
    """A tuple that is empty, or holds one value of this rule."""

    def flaw(value: object) -> object:
        if not isinstance(value, tuple):
            return type(value).__name__
        return f"{len(value)} values" if len(value) > 1 else of.flaw(*value) if value else None

    return Field(f"a tuple, empty or with {of.rule}", flaw)


def _field(rule: str, holds: Callable[[Any], bool], default: Any = REQUIRED) -> Field:
    return Field(rule, lambda value: None if holds(value) else reprlib.repr(value), default)


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


TEXT = _field("a string", lambda v: isinstance(v, str))
FLAG = _field("a bool", lambda v: isinstance(v, bool))
FRACTION = _field("a number in (0, 1]", lambda v: _is_number(v, (int, float)) and 0 < v <= 1)
NAMES = _field(
    "lists of strings",
    lambda v: (
        isinstance(v, list)
        and all(isinstance(own, list) and own and all(type(k) is str for k in own) for own in v)
    ),
)
BY_NAME = _field(
    "a dict with strings as keys", lambda v: isinstance(v, dict) and all(type(k) is str for k in v)
)
