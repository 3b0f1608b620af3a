"""The backend "ptx-triton" executes the PTX that Triton compiles for sm_90, on CPU tensors.

Triton gets a driver that uses the executor as a GPU. Therefore, Triton compiles and launches the
same kernels as on a GPU, with the same options and specialization of arguments. Triton
decides at import whether it interprets or compiles kernels, so TRITON_INTERPRET=0 must be set.
"""

import hashlib
import struct
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget

from dct_kernels import triton as ops
from dct_kernels._ops import OPS, checked

from .backend import executor

_SHARED_BYTES, _THREADS = 227 << 10, 1024  # limit per block on sm_90


class _Launcher:
    """Launches one kernel; has the interface of Triton's launchers for GPUs."""

    def __init__(self, src, metadata):
        self._types = list(src.signature.values())
        self._metadata = metadata
        used = [name for name, unused in _UNSUPPORTED.items() if getattr(metadata, name) != unused]
        used += [type for type in self._types if type not in _TYPES and type[0] != "*"]
        if used:
            raise NotImplementedError(f"{metadata.name} uses {', '.join(used)}")

    def __call__(self, x, y, z, stream, function, *rest):
        assert (y, z) == (1, 1)
        arguments = rest[-len(self._types) :]
        values = [
            _bits(argument) if type == "fp32" else argument
            for type, argument in zip(self._types, arguments, strict=True)
            if type != "constexpr"
        ]
        no_scratch = (0, 0)  # the last two parameters of each kernel
        executor().launch(
            function,
            *(x, 32 * self._metadata.num_warps),
            *(*values, *no_scratch),
            shared_bytes=self._metadata.shared,
            replicas=True,  # several threads may have the same element of a tensor
        )


def _bits(argument: float) -> int:
    """The bits of a float32."""
    return struct.unpack("<I", struct.pack("<f", argument))[0]


_TYPES = ("constexpr", "i1", "u1", "i32", "u32", "i64", "u64", "fp32", "fp64")
# {unsupported option of a kernel: its value if the kernel does not use it}
_UNSUPPORTED = {
    "num_ctas": 1,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}


def _load_binary(name: str, text: bytes, shared: int, device: int):
    """Return (module, kernel, registers, spills, maximum number of threads per block).

    Triton gives all variants of a kernel the same name. This function makes the names unique.
    """
    unique = f"{name}_{hashlib.sha256(text).hexdigest()[:8]}"
    executor().load(text.decode().replace(name, unique))
    return unique, unique, 0, 0, _THREADS


def _stages(*arguments):
    """Stop the compilation at PTX instead of calling ptxas."""
    if not arguments:
        return "ptx", "ptx"  # separates Triton's caches
    stages = arguments[1]
    stages["cubin"] = lambda text, metadata: text.encode()
    return None


def backend() -> SimpleNamespace:
    """Return the ops. From now on, Triton uses only the executor in this process."""
    triton.knobs.runtime.add_stages_inspection_hook = _stages
    utils = SimpleNamespace(
        load_binary=_load_binary, get_device_properties=lambda _: {"max_shared_mem": _SHARED_BYTES}
    )
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=_Launcher,
        utils=utils,
    )
    triton.runtime.driver.set_active(driver)
    return SimpleNamespace(
        **{name: checked(getattr(ops, name), name) for name in OPS}, device="cpu"
    )
