"""The backend "emulated"."""

import ctypes
import functools

from ptx.launchers import Argument, launchers, to_c

from dct_kernels._schemas import OPS

from . import build


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build.build("../ptx/module.cpp", OPS, shared=True)))


def configure(seed: int, resident_blocks: int = 3) -> None:
    """Choose the order of blocks and threads for all later calls; 0 runs them in order."""
    _library().configure(ctypes.c_int64(seed), ctypes.c_int64(resident_blocks))


def cut_as_of(times: int) -> None:
    """Let mask_pack cut up tensors as it does those that are so many times as large."""
    _library().mask_pack_as_of(ctypes.c_int64(times))


def counted() -> tuple[int, int]:
    """(kernels, memsets) launched so far."""
    kernels, memsets = ctypes.c_int64(), ctypes.c_int64()
    _library().counted(ctypes.byref(kernels), ctypes.byref(memsets))
    return kernels.value, memsets.value


def _call(op: str, *arguments: Argument) -> None:
    error = getattr(_library(), op)(*map(to_c, arguments))
    if error:
        raise RuntimeError(f"{op} returned cudaError_t {error}")


BACKEND = launchers(_call)
