"""The backend "ptx-triton": what Triton makes of its kernels for sm_90, executed, on CPU tensors.

Triton is given a driver that has the executor for a GPU, so that what is compiled and launched is
what a user gets: the same specialisation of the arguments, the same options. It interprets kernels
or compiles them, and decides that when it is imported: TRITON_INTERPRET=0 asks for this backend.
"""

import hashlib
import struct
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget

from dct_kernels import triton as ops
from dct_kernels._ops import OPS, checked

from .backend import executor

_SHARED_BYTES, _THREADS = 227 << 10, 1024  # of a block on sm_90, at most


class _Launcher:
    """Of one kernel; Triton calls it as it calls that of a GPU."""

    def __init__(self, src, metadata):
        self._types = list(src.signature.values())
        self._metadata = metadata
        used = [name for name, none in _LEFT_OUT.items() if getattr(metadata, name) != none]
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
        no_scratch = (0, 0)  # the last two parameters of every kernel
        executor().launch(
            function,
            *(x, 32 * self._metadata.num_warps),
            *(*values, *no_scratch),
            shared_bytes=self._metadata.shared,
            replicas=True,  # of a tensor's elements, which several threads may hold
        )


def _bits(argument: float) -> int:
    """Of a float32."""
    return struct.unpack("<I", struct.pack("<f", argument))[0]


_TYPES = ("constexpr", "i1", "u1", "i32", "u32", "i64", "u64", "fp32", "fp64")
# What a kernel may ask for beyond its arguments, and where it does not.
_LEFT_OUT = {
    "num_ctas": 1,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}


def _load_binary(name: str, text: bytes, shared: int, device: int):
    """Returns a module, a kernel of it, its registers, its spills and its most threads.

    Triton gives every variant of a kernel the same name. Here each variant has its own.
    """
    own = f"{name}_{hashlib.sha256(text).hexdigest()[:8]}"
    executor().load(text.decode().replace(name, own))
    return own, own, 0, 0, _THREADS


def _stages(*arguments):
    """Of compilation: in place of what ptxas makes of PTX, PTX."""
    if not arguments:
        return "ptx", "ptx"  # keeps what is cached apart
    stages = arguments[1]
    stages["cubin"] = lambda text, metadata: text.encode()
    return None


def backend() -> SimpleNamespace:
    """The ops. From now on Triton has no other GPU in this process."""
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
