"""The executor, and the backend "ptx-cuda": nvcc's PTX of the CUDA kernels, on CPU tensors."""

import ctypes
import functools
from typing import NamedTuple

import torch

from . import build
from .launchers import launchers, to_c


class Launches(NamedTuple):
    """How often an op used the GPU."""

    kernels: int
    memsets: int


class Executor:
    """A library that `build` made."""

    def __init__(self, path):
        self._library = ctypes.CDLL(str(path))
        for function in ("ptx_error", "ptx_counts", "ptx_text"):
            getattr(self._library, function).restype = ctypes.c_char_p

    def configure(self, seed: int, resident_blocks: int = 3) -> None:
        """Choose the order in which all later calls run; 0 runs warps in turn, lanes together."""
        self._library.ptx_configure(ctypes.c_int64(seed), ctypes.c_int64(resident_blocks))

    def call(self, op: str, *arguments) -> None:
        """Call a launcher. Device memory is what the tensors among its arguments hold."""
        fields = b"".join(bytes(to_c(argument)) for argument in arguments)
        self._on_device(op, lambda: getattr(self._library, op)(fields), arguments)

    def cut_as_of(self, times: int) -> None:
        """Let mask_pack cut up tensors as it does those that are so many times as large."""
        self._library.mask_pack_as_of(ctypes.c_int64(times))

    def load(self, text: str) -> None:
        """Add the kernels of a PTX text to those of the launchers."""
        self._check("load", self._library.ptx_load(text.encode()))

    def launch(
        self,
        kernel: str,
        blocks: int,
        threads: int,
        *arguments,
        shared_bytes: int = 0,
        replicas: bool = False,
    ) -> None:
        """Run a kernel on tensors, whose memory is then the device's, and 64-bit integers.

        With `replicas` it is no race if threads of a block store the same value to one place in
        shared memory.
        """
        values = [to_c(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = [ctypes.c_int64(size) for size in (blocks, threads, shared_bytes)]

        def run() -> int:
            allowed = ctypes.c_int64(replicas)
            return self._library.ptx_launch(kernel.encode(), *sizes, pointers, allowed)

        self._on_device(kernel, run, arguments)

    def counts(self) -> str:
        """What was executed since `configure`, as runtime.cpp describes it."""
        return self._library.ptx_counts().decode()

    def launches(self) -> Launches:
        """How many there were since `configure`."""
        totals, *_ = self.counts().split("\n\n")
        return Launches(*map(int, totals.split()[2:]))

    def text(self, kernel: str) -> str:
        """The PTX that a kernel is part of."""
        return self._library.ptx_text(kernel.encode()).decode()

    def _on_device(self, what: str, function, arguments) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        for tensor in tensors:
            written = not vars(tensor).pop("is_poisoned", False)  # after this call it is
            self._library.ptx_allocate(to_c(tensor), *map(ctypes.c_int64, (tensor.nbytes, written)))
        try:
            self._check(what, function())
        finally:
            for tensor in tensors:
                self._library.ptx_free(to_c(tensor))

    def _check(self, what: str, error: int) -> None:
        if error:
            message = self._library.ptx_error().decode()
            raise RuntimeError(f"{what} returned cudaError_t {error}: {message}")


@functools.cache
def executor() -> Executor:
    return Executor(build.build())


BACKEND = launchers(lambda *arguments: executor().call(*arguments))
