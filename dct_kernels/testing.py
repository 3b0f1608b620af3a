"""For tests and benchmarks: the ops of all backends in one process."""

from types import SimpleNamespace

import torch

from . import reference
from ._load import available
from ._ops import OPS, checked

__all__ = ["available", "backends"]


def backends() -> dict[str, SimpleNamespace]:
    """{backend: a namespace with its ops and `.device`, the device of their tensors}.

    The result contains only backends that can run. `eager` supports any device, but its `.device`
    is the CPU. The `.device` of `triton` is the CPU with TRITON_INTERPRET=1, else a GPU.
    """

    def python(backend: object, device: str) -> SimpleNamespace:
        return SimpleNamespace(
            **{op: checked(getattr(backend, op), op) for op in OPS}, device=device
        )

    found = {"eager": python(reference, "cpu")}
    for name, device in (("cpp", "cpu"), ("cuda", "cuda")):
        if not available()[name] and (device == "cpu" or torch.cuda.is_available()):
            ops = {op: getattr(torch.ops.dct, op).default for op in OPS}
            found[name] = SimpleNamespace(**ops, device=device)
    if not available()["triton"]:
        from . import triton  # Triton may not be installed

        found["triton"] = python(triton, "cpu" if triton.INTERPRETED else "cuda")
    return found
