"""Which backends this process has, and why it lacks the others.

`DCT_BACKEND=eager|cpp|cuda|triton` forces one: then no other may serve in its place, and importing
fails if it is not there. Without it the dispatcher takes the best: compiled kernels for the
devices they were built for, eager PyTorch for the rest.
"""

import os
from pathlib import Path

import torch

from . import reference
from ._schemas import OPS, library

BACKENDS = ("eager", "cpp", "cuda", "triton")
REQUESTED = os.environ.get("DCT_BACKEND")

_KEYS = {"cpp": "CPU", "cuda": "CUDA"}
_missing: dict[str, str] = {}  # backend -> why this process does not have it


def available() -> dict[str, str]:
    """{backend: "" if it is there, else the reason why not}, in the order of `BACKENDS`."""
    return {name: _missing.get(name, "") for name in BACKENDS}


def setup() -> None:
    """Load the compiled kernels and register the eager ones. Called once, on import."""
    if REQUESTED not in (None, *BACKENDS):
        raise ImportError(f"DCT_BACKEND must be one of {', '.join(BACKENDS)}, got {REQUESTED!r}")
    _load_extension()
    _missing["triton"] = "this version has no Triton kernels"
    if REQUESTED in (None, "eager"):
        for name in OPS:
            library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
    if REQUESTED is not None and REQUESTED in _missing:
        reason = _missing[REQUESTED]
        raise ImportError(f"DCT_BACKEND={REQUESTED}, but that backend is not there: {reason}")


def _load_extension() -> None:
    reason = ""
    files = sorted(Path(__file__).parent.glob("_C*.so"))
    if REQUESTED not in (None, *_KEYS):
        reason = f"DCT_BACKEND={REQUESTED}"
    elif not files:
        reason = f"no compiled extension in {Path(__file__).parent}"
    else:
        try:
            torch.ops.load_library(files[0])
        except OSError as error:  # another torch, another libstdc++: the eager kernels still serve
            reason = f"{files[0].name} does not load: {error}"
    for name, key in _KEYS.items():
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if not has_kernel("dct::mask_pack", key):
            _missing[name] = reason or f"the extension was built without {key} kernels"
