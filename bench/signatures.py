"""Writes the signatures of public functions and classes into docs/reference.

    python -m bench.signatures

A block is between `<!-- signatures: PACKAGE -->` and `<!-- end signatures -->`.
"""

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

PAGES = Path(__file__).parents[1] / "docs" / "reference"
BLOCK = re.compile(
    r"(?P<begin>^<!-- signatures: (?P<package>\w+) -->\n).*?(?P<end>^<!-- end signatures -->$)",
    re.DOTALL | re.MULTILINE,
)
WIDTH = 88  # characters that fit on the website without scrolling


def fill(text: str) -> str:
    """Return the text of a page with its blocks rewritten."""
    return BLOCK.sub(
        lambda block: f"{block['begin']}{render(block['package'])}{block['end']}", text
    )


def render(package: str) -> str:
    """Render code blocks: ops with their schemas, then functions and classes of Python only."""
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
    """The arguments in the schema of the op `name`; None if there is no such op."""
    op = getattr(torch.ops.dct, name, None)
    return None if op is None else str(op.default._schema).removeprefix(f"dct::{name}")


def _entry(call: str, value: Callable) -> str:
    """The call, with lines aligned at the bracket; the first docstring line; and the methods."""
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
    """Yield documented public methods that `kind` itself defines; none for a dataclass."""
    members = {} if dataclasses.is_dataclass(kind) else vars(kind)
    for name, value in members.items():
        if inspect.isfunction(value) and not name.startswith("_") and value.__doc__:
            yield f".{name}{_arguments(value, skip=1)}"


def _arguments(value: Callable, skip: int = 0) -> str:
    """The arguments of a call, with defaults and without annotations."""
    parameters = list(inspect.signature(value).parameters.values())[skip:]
    return str(inspect.Signature(map(_shown, parameters)))


class _Text(str):
    """The source text of a default value."""

    __repr__ = str.__str__


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    value, empty = parameter.default, inspect.Parameter.empty
    text = value if value is empty else _Text(_written(value))
    return parameter.replace(annotation=empty, default=text)


def _written(value: object) -> str:
    if isinstance(value, torch.distributed.ReduceOp.RedOpType):
        return f"ReduceOp.{value.name}"
    return value.__name__ if inspect.isfunction(value) else repr(value)


def differing() -> dict[Path, str]:
    """Return {page: correct text} for the pages that are out of date."""
    texts = {page: fill(page.read_text()) for page in sorted(PAGES.glob("*.md"))}
    return {page: text for page, text in texts.items() if page.read_text() != text}


if __name__ == "__main__":
    for page, text in differing().items():
        print(page.name)
        page.write_text(text)
