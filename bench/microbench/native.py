"""Compiles native.cu with nvcc when it is first needed, and calls it through ctypes."""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import cpp_extension

SOURCE = Path(__file__).parent / "native.cu"


@functools.cache
def missing() -> str | None:
    """The reason why the native library is not available, or None."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if not cpp_extension.CUDA_HOME or not Path(cpp_extension.CUDA_HOME, "bin", "nvcc").exists():
        return "there is no nvcc (set CUDA_HOME)"
    try:
        _library()
    except (OSError, subprocess.CalledProcessError) as error:
        text = getattr(error, "stderr", "") or str(error)
        return f"native.cu does not build: {text.strip().splitlines()[-1]}"
    return None


def copy(to: Tensor, source: Tensor) -> None:
    """Copy contiguous tensors with 16-byte streaming loads and stores."""
    _call("native_copy", to, source, source.nbytes)


class Select:
    """Adds grad to the residual, and moves magnitudes >= tau out with cub::DeviceSelect."""

    def __init__(self, numel: int, capacity: int) -> None:
        nbytes = ctypes.c_size_t()
        error = _library().native_select_scratch(ctypes.c_int64(numel), ctypes.byref(nbytes))
        if error:
            raise RuntimeError(f"native_select_scratch returned cudaError_t {error}")
        self.scratch = torch.empty(nbytes.value, dtype=torch.uint8, device="cuda")
        # DeviceSelect writes all selected entries, so the capacity must be large enough.
        self.indices = torch.empty(capacity, dtype=torch.int32, device="cuda")
        self.values = torch.empty(capacity, device="cuda")
        self.count = torch.empty(1, dtype=torch.int32, device="cuda")

    def __call__(self, residual: Tensor, grad: Tensor, tau: Tensor) -> None:
        found = (self.indices, self.values, self.count)
        scratch = (self.scratch, self.scratch.nbytes)
        _call("native_select", residual, grad, tau, *found, residual.numel(), *scratch)


def _call(name: str, *arguments: Tensor | int) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    passed = [
        ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int64(a)
        for a in arguments
    ]
    error = getattr(_library(), name)(*passed, stream)
    if error:
        raise RuntimeError(f"{name} returned cudaError_t {error}")


@functools.cache
def _library() -> ctypes.CDLL:
    """Build the library in the user's cache. Its name has a hash of the command and sources."""
    major, minor = torch.cuda.get_device_capability()
    nvcc = Path(cpp_extension.CUDA_HOME, "bin", "nvcc").resolve()
    command = [str(nvcc), "-O3", "-std=c++17", f"-arch=sm_{major}{minor}", "-shared"]
    command += ["-Xcompiler", "-fPIC", str(SOURCE)]
    inputs = " ".join(command).encode() + SOURCE.read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dct_microbench")
    library = cache / f"native-{hashlib.sha256(inputs).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder, "native.so")
            subprocess.run([*command, "-o", built], check=True, capture_output=True, text=True)
            built.rename(library)  # atomically
    return ctypes.CDLL(str(library))
