"""Which backends this process has, and why it lacks the others.

`DCT_BACKEND=eager|cpp|cuda|triton` forces one: then no other may serve in its place, and importing
fails if it is not there. Without it the dispatcher takes the best: compiled kernels for the
devices they were built for, eager PyTorch for the rest.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import reference
from ._schemas import OPS, library

BACKENDS = ("eager", "cpp", "cuda", "triton")
REQUESTED = os.environ.get("DCT_BACKEND")

_KEYS = {"cpp": "CPU", "cuda": "CUDA"}
_missing: dict[str, str] = {}  # backend -> why this process does not have it


def available() -> dict[str, str]:
    """{backend: "" if it is there, else the reason why not}, in the order of `BACKENDS`."""
    return {**{name: _missing.get(name, "") for name in BACKENDS}, "triton": _why_no_triton()}


def backend_of(device: torch.device | str) -> str:
    """Which backend serves the ops for tensors on this device: "cpp", "cuda", "triton" or "eager".

    >>> backend_of("cpu")
    'cpp'
    """
    key = torch.device(device).type.upper()
    compiled = {key: name for name, key in _KEYS.items()}.get(key)
    if compiled is None or not _has_kernel(key):
        return "eager"
    return "triton" if compiled in _missing else compiled


def setup() -> None:
    """Load the compiled kernels and register the eager ones. Called once, on import."""
    if REQUESTED not in (None, *BACKENDS):
        raise ImportError(f"DCT_BACKEND must be one of {', '.join(BACKENDS)}, got {REQUESTED!r}")
    _load_extension()
    _register_triton()
    if REQUESTED in (None, "eager"):
        for name in OPS:
            library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
    reason = available()[REQUESTED] if REQUESTED else ""
    if reason:
        raise ImportError(f"DCT_BACKEND={REQUESTED}, but that backend is not there: {reason}")


def _load_extension() -> None:
    reason = ""
    files = sorted(Path(__file__).parent.glob("_C*.so"))
    if REQUESTED not in (None, *_KEYS):
        reason = f"DCT_BACKEND={REQUESTED}"
    elif not files:
        reason = _why_no_extension()
    else:
        try:
            torch.ops.load_library(files[0])
        except OSError as error:  # another torch, another libstdc++: the eager kernels still serve
            reason = f"{files[0].name} does not load: {error}"
    for name, key in _KEYS.items():
        if not _has_kernel(key):
            _missing[name] = reason or f"the extension was built without {key} kernels"


def _why_no_extension() -> str:
    folder = Path(__file__).parent
    if (folder.parent / "setup.py").exists():
        return f"nothing is compiled in this checkout, {folder.parent}: leave it, or build in place"
    return f"nothing is compiled in {folder}: install again with a C++ compiler and no DCT_BUILD=0"


def _has_kernel(key: str) -> bool:
    """Whether the ops have a kernel of their own, not eager's, for a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("dct::mask_pack", key)


def _register_triton() -> None:
    """For CUDA tensors that no compiled kernel takes; if it is forced and interpreted, for all."""
    keys = []
    if REQUESTED == "triton" and not _why_no_triton():
        keys = ["CUDA", "CPU"] if _triton().INTERPRETED else ["CUDA"]
    elif REQUESTED is None and "cuda" in _missing and importlib.util.find_spec("triton"):
        keys = ["CUDA"]
    for key in keys:
        for name in OPS:
            library.impl(name, _call_triton(name), key)


def _call_triton(name: str) -> Callable[..., Any]:
    # Triton is imported by the first call: most processes that could use it never do.
    return lambda *args, **kwargs: getattr(_triton(), name)(*args, **kwargs)


def _triton() -> ModuleType:
    return importlib.import_module(".triton", __package__)


def _why_no_triton() -> str:
    if REQUESTED not in (None, "triton"):
        return f"DCT_BACKEND={REQUESTED}"
    try:
        interpreted = _triton().INTERPRETED
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    if not interpreted and not torch.cuda.is_available():
        return "no GPU, and TRITON_INTERPRET is not set"
    return ""
