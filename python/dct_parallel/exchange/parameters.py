"""Parameters by their names in the unwrapped model, the same on every rank."""

import hashlib
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

_AnyTensor = TypeVar("_AnyTensor", bound=Tensor)

# Parts of a name that come and go with a wrapper: of torch.compile, and of checkpoint_wrapper.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrapped(name: str) -> str:
    """The name of a parameter in the unwrapped model."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def describe(names: Mapping[_AnyTensor, str]) -> str:
    """One line that must be the same on every rank, of names, sizes and dtypes, in order."""
    lines = [f"{name} {p.dtype} {tuple(p.shape)}\n" for p, name in names.items()]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()[:12]
    numel = sum(parameter.numel() for parameter in names)
    return f"{len(names)} parameters of {numel:,} elements, names and shapes {digest}"
