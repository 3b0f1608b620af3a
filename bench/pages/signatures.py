"""Blocks in docs/reference: every public name of a package with its arguments, as text.

A block is what stands between two lines; the site shows the docstrings below it.

    <!-- signatures: PACKAGE -->
    <!-- end signatures -->
"""

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .render import ROOT

BLOCK = re.compile(
    r"(?P<begin>^<!-- signatures: (?P<package>\w+) -->\n).*?(?P<end>^<!-- end signatures -->$)",
    re.DOTALL | re.MULTILINE,
)
WIDTH = 88  # characters, which the site shows whole


def pages() -> list[Path]:
    """Those that may have blocks."""
    return sorted((ROOT / "docs" / "reference").glob("*.md"))


def fill(text: str) -> str:
    """The page's text, its blocks made anew."""
    return BLOCK.sub(
        lambda block: f"{block['begin']}{render(block['package'])}{block['end']}", text
    )


def render(package: str) -> str:
    """The names as blocks of code: ops with their schemas, then what there is in Python only."""
    module = importlib.import_module(package)
    named = {name: getattr(module, name) for name in module.__all__}
    schemas = {name: schema for name in named if (schema := _schema(name)) is not None}
    ops = [_entry(name + schema, named[name]) for name, schema in schemas.items()]
    python = [
        _entry(name + _arguments(value), value)
        for name, value in named.items()
        if name not in schemas
    ]
    if not ops:
        return _code(python)
    only = "In Python only, not in `torch.ops.dct`:\n"
    return f"{_code(ops)}\n{only}{_code(python)}"


def _code(entries: list[str]) -> str:
    return "```\n{}\n```\n".format("\n".join(entries))


def _schema(name: str) -> str | None:
    """Of the op of this name, if there is one."""
    op = getattr(torch.ops.dct, name, None)
    return None if op is None else str(op.default._schema).removeprefix(f"dct::{name}")


def _entry(call: str, value: Callable) -> str:
    """The call, wrapped below its bracket, the first line of its docstring, and its methods."""
    indent = " " * (call.index("(") + 1)
    whole = call.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")
    lines = textwrap.wrap(whole, WIDTH, subsequent_indent=indent, break_long_words=False)
    lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
    first, *_ = inspect.getdoc(value).splitlines()
    lines += textwrap.wrap(first, WIDTH, initial_indent="    ", subsequent_indent="    ")
    methods = ", ".join(_methods(value)) if inspect.isclass(value) else ""
    lines += textwrap.wrap(methods, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _methods(kind: type) -> Iterator[str]:
    """Public ones that it defines itself, documented, with their arguments; a value has none."""
    own = {} if dataclasses.is_dataclass(kind) else vars(kind)
    for name, value in own.items():
        if inspect.isfunction(value) and not name.startswith("_") and value.__doc__:
            yield f".{name}{_arguments(value, skip=1)}"


def _arguments(value: Callable, skip: int = 0) -> str:
    """Of a call, with defaults and without annotations."""
    signature = inspect.signature(value)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_shown(parameter.default))
        for parameter in list(signature.parameters.values())[skip:]
    ]
    return str(inspect.Signature(parameters))


def _shown(default: object) -> object:
    return default if default is inspect.Parameter.empty else _Shown(default)


class _Shown:
    """A default as one writes it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        if inspect.isfunction(self._value):
            return self._value.__name__
        if isinstance(self._value, torch.distributed.ReduceOp.RedOpType):
            return f"ReduceOp.{self._value.name}"
        return repr(self._value)
