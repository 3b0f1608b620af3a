"""Compiles the kernels that host functions launch. The target GPU need not be present.

An op is called on fake tensors. Each launch goes through Triton's JIT, which compiles the kernel
and does not run it. So a kernel has the same specialization and options as in a user's program.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel. Wide accesses have 128 bits, narrow ones 16 to 64."""

    spills: int  # bytes of stack on NVIDIA, vector registers on AMD
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    narrow_stores: int
    fma: int  # float32 instructions
    fusion: bool  # whether the compiler may generate fma instructions


def compile_launches(architecture: str, call: Callable[[], object]) -> list[Kernel]:
    """Runs `call`, whose tensors are fake, and compiles the kernels that it launches."""
    with _compiling(TARGETS[architecture]) as compiled, FakeTensorMode():
        call()
    return [_examine(kernel) for kernel in compiled]


@contextlib.contextmanager
def _compiling(target: GPUTarget) -> Iterator[list]:
    """In this context, a launch only compiles its kernel and appends it to the yielded list."""
    compiled = []
    run = JITFunction.run

    def mock(argument):
        return MockTensor(argument.dtype) if isinstance(argument, torch.Tensor) else argument

    def compile_only(self, *args, grid, warmup, **kwargs):
        kwargs = {name: mock(argument) for name, argument in kwargs.items()}
        compiled.append(run(self, *map(mock, args), grid=grid, warmup=True, **kwargs))

    JITFunction.run = compile_only
    driver = SimpleNamespace(  # a driver that needs no GPU
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    triton.runtime.driver.set_active(driver)
    try:
        yield compiled
    finally:
        JITFunction.run = run


def _examine(kernel) -> Kernel:
    facts = _examine_ptx(kernel) if "ptx" in kernel.asm else _examine_amdgcn(kernel.asm["amdgcn"])
    return Kernel(fusion=kernel.metadata.enable_fp_fusion, **facts)


def _examine_ptx(kernel) -> dict[str, int]:
    ptx = kernel.asm["ptx"]
    machine_code = _cuobjdump(kernel.asm["cubin"])
    return {
        "spills": int(re.search(r" STACK:(\d+)", machine_code)[1]),
        "wide_loads": _count(r"\bld\.global\S*\.v4\.[bf]32", ptx),
        "narrow_loads": _count(r"\bld\.global(?!\S*\.v4\.[bf]32)\S*\.[a-z](16|32|64)\b", ptx),
        "wide_stores": _count(r"\bst\.global\S*\.v4\.[bf]32", ptx),
        "narrow_stores": _count(r"\bst\.global(?!\S*\.v4\.[bf]32)\S*\.[a-z](16|32|64)\b", ptx),
        # The assembler can also fuse multiply-adds.
        "fma": max(_count(r"\bfma\.\S*f32", ptx), _count(r"\bFFMA2?\b", machine_code)),
    }


def _examine_amdgcn(code: str) -> dict[str, int]:
    wide, narrow = "dwordx4", r"(dword|dwordx2|ushort|sshort|short|short_d16(_hi)?)"
    return {
        "spills": int(re.search(r"\.vgpr_spill_count:\s+(\d+)", code)[1]),
        "wide_loads": _count(rf"\b(global|buffer)_load_{wide}\b", code),
        "narrow_loads": _count(rf"\b(global|buffer)_load_{narrow}\b", code),
        "wide_stores": _count(rf"\b(global|buffer)_store_{wide}\b", code),
        "narrow_stores": _count(rf"\b(global|buffer)_store_{narrow}\b", code),
        "fma": _count(r"\bv_(pk_)?(fma|fmac|mad|mac)_(legacy_)?f32", code),
    }


def _count(pattern: str, text: str) -> int:
    return sum(1 for _ in re.finditer(pattern, text))


def _cuobjdump(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
