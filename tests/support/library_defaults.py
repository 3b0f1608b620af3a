"""Sets torch's default dtype and device for the packages, but not for the tests."""

import contextlib
import sys

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

_PACKAGES = ("dct_kernels", "dct_parallel", "dct_embeddings")


@contextlib.contextmanager
def seen_by_packages(dtype, device="cpu"):
    """Set the defaults for the packages. Other code creates float32 tensors on the CPU."""
    if (dtype, device) == (torch.float32, "cpu"):
        yield
        return
    device_context = contextlib.nullcontext() if device == "cpu" else torch.device(device)
    with device_context, _DefaultsOfOthers(), _default_dtype(dtype):
        yield


@contextlib.contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _DefaultsOfOthers(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_factory = function in _device_constructors() and not torch.compiler.is_compiling()
        if is_factory and _caller() not in _PACKAGES:
            with torch.device("cpu"), _default_dtype(torch.float32):
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def _caller():
    """The nearest package on the stack except torch, whose own modules also create tensors."""
    frame = sys._getframe(2)
    while (package := frame.f_globals.get("__name__", "").partition(".")[0]) == "torch":
        frame = frame.f_back
    return package
