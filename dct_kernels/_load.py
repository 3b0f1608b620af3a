"""Loads the backends, and reports which ones are available and why others are missing.

`DCT_BACKEND=eager|cpp|cuda|triton` selects one backend, and the import fails if that backend is not
available. Otherwise the dispatcher uses compiled kernels on the devices that they were built for.
Without CUDA kernels, CUDA tensors use Triton if it is installed. Other devices use eager PyTorch.
`python -m dct_kernels` imports the package with any value, and prints why other imports fail.
"""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import _torch, checks, reference
from ._ops import OPS, checked, library, schemas_digest

BACKENDS = ("eager", "cpp", "cuda", "triton")
VARIABLE = os.environ.get("DCT_BACKEND")
REQUESTED = VARIABLE if VARIABLE in BACKENDS else None

_COMPILED = {"CPU": "cpp", "CUDA": "cuda"}  # dispatch key -> backend
_PACKAGE = Path(__file__).parent
_FILES = {
    backend: next(_PACKAGE.glob(f"{library}.*so"), None)
    for backend, library in (("cpp", "_C"), ("cuda", "_cuda"))
}
_missing: dict[str, str] = {}  # backend -> why it is not available


def available() -> dict[str, str]:
    """{backend: "" if it is available, else the reason}, in the order of `BACKENDS`."""
    return {**{name: _missing.get(name, "") for name in BACKENDS}, "triton": _why_no_triton()}


def built_with() -> dict[str, str]:
    """{backend: the torch version that its library was built with}, for libraries that exist."""
    return {backend: _built_with(file)[0] for backend, file in _FILES.items() if file is not None}


def backend_of(device: torch.device | str) -> str:
    """Return the backend for tensors on a device: "cpp", "cuda", "triton" or "eager".

    The result does not change within a process. The device does not have to exist.

    Raises:
        ValueError: `device` is not a valid torch device.

    >>> backend_of("cpu")
    'cpp'
    """
    key = checks.require_device("backend_of", device).type.upper()
    compiled = _COMPILED.get(key)
    if compiled is None or not _torch.has_kernel("dct::mask_pack", key):
        return "eager"
    return "triton" if compiled in _missing else compiled


def setup() -> None:
    """Load or register the kernels of the selected backends. Called once, on import."""
    for backend, file in _FILES.items():
        if reason := _why_not_loaded(backend, file):
            _missing[backend] = reason
    _register_triton()
    if REQUESTED in (None, "eager"):
        for name in OPS:
            library.impl(name, checked(getattr(reference, name), name), "CompositeExplicitAutograd")
    # Before Python runs a package's __main__, sys.argv[0] is "-m".
    named = any(argument.endswith("dct_kernels") for argument in sys.orig_argv)
    is_command = named and sys.argv[:1] == ["-m"]
    if not is_command and (error := why_no_import()):
        raise ImportError(error)


def why_no_import() -> str:
    """Why the value of DCT_BACKEND makes the import fail, or ""."""
    if VARIABLE not in (None, *BACKENDS):
        return f"DCT_BACKEND must be one of {', '.join(BACKENDS)}, got {VARIABLE!r}"
    if REQUESTED and (reason := available()[REQUESTED]):
        return f"DCT_BACKEND={REQUESTED}, but that backend is not available: {reason}"
    return ""


def _why_not_loaded(backend: str, file: Path | None) -> str:
    """Load a library. Return the reason if it cannot be loaded, else ""."""
    if REQUESTED not in (None, *_FILES):
        return f"DCT_BACKEND={REQUESTED}"
    if file is None:
        without = "the extension was built without CUDA kernels"
        return _missing.get("cpp", without) if backend == "cuda" else _why_no_extension()
    cuda = torch.version.cuda
    if backend == "cuda" and cuda is None:
        return "this torch was built without CUDA"
    built_with = "unknown"
    try:
        built_with, schemas = _built_with(file)
        if schemas != schemas_digest() and built_with != "unknown":  # would misread its arguments
            return f"{file.name} was compiled for other schemas of the ops: rebuild it"
        if backend == "cuda" and not _is_for_cuda(file, cuda):
            return f"{file.name} was built for another CUDA version than this torch ({cuda})"
        torch.ops.load_library(file)
    except OSError as error:  # for example built with another torch or libstdc++
        return f"{file.name}, built with torch {built_with}, does not load: {error}"
    return ""


def _is_for_cuda(file: Path, version: str | None) -> bool:
    """Whether the library uses the CUDA runtime with the same major version as `version`."""
    runtime = f"libcudart.so.{str(version).partition('.')[0]}\0"
    return runtime.encode() in file.read_bytes()


def _built_with(file: Path) -> tuple[str, str]:
    """The torch version and the schema digest in a library, from csrc/bindings/built_with.cpp."""
    text = rb"dct_kernels built with torch ([\w.+]+)(?: for schemas (\w+))?"
    found = re.search(text, file.read_bytes())
    return (found[1].decode(), (found[2] or b"").decode()) if found else ("unknown", "")


def _why_no_extension() -> str:
    checkout = _PACKAGE.parent
    if (checkout / "setup.py").exists():
        return f"nothing is compiled in this checkout, {checkout}: run elsewhere, or build in place"
    return f"nothing is compiled in {_PACKAGE}: install again without DCT_BUILD=0"


def _register_triton() -> None:
    """Register Triton if it is selected, or if no compiled kernel supports CUDA tensors."""
    keys = []
    if REQUESTED == "triton" and not _why_no_triton():
        keys = ["CUDA", "CPU"] if _triton().INTERPRETED else ["CUDA"]
    elif REQUESTED is None and "cuda" in _missing and importlib.util.find_spec("triton"):
        keys = ["CUDA"]
    for key in keys:
        for name in OPS:
            library.impl(name, _call_triton(name), key)


def _call_triton(name: str) -> Callable[..., Any]:
    # The first call imports Triton, because most processes never use it.
    return lambda *args, **kwargs: checked(getattr(_triton(), name), name)(*args, **kwargs)


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
