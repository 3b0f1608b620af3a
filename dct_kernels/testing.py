"""For tests and benches: every backend's ops side by side in one process."""

from types import SimpleNamespace

import torch

from . import reference
from ._load import available, checked
from ._ops import OPS

__all__ = ["available", "backends"]


def backends() -> dict[str, SimpleNamespace]:
    """{name: its ops as callables, and `.device`, the device whose tensors they take}.

    Only those that this process can run. `eager` takes any device and is listed on the CPU; so is
    `triton` where its kernels are interpreted (TRITON_INTERPRET=1).
    """
    compiled = {"cpp": "cpu", "cuda": "cuda"}
    found = {"eager": SimpleNamespace(**{op: checked(reference, op) for op in OPS}, device="cpu")}
    for name, device in compiled.items():
        if not available()[name] and (device == "cpu" or torch.cuda.is_available()):
            ops = {op: getattr(torch.ops.dct, op).default for op in OPS}
            found[name] = SimpleNamespace(**ops, device=device)
    if not available()["triton"]:
        from . import triton  # only here: it is not everywhere

        device = "cpu" if triton.INTERPRETED else "cuda"
        ops = {op: checked(triton, op) for op in OPS}
        found["triton"] = SimpleNamespace(**ops, device=device)
    return found
