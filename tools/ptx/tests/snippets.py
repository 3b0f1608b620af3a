"""Wraps a few lines of PTX in a kernel, and runs the kernel."""

import itertools

import torch

from ..backend import executor

_REGISTERS = """
.reg .pred %p<10>;
.reg .b16 %rs<10>;
.reg .b32 %r<10>;
.reg .b64 %rd<10>;
.reg .f32 %f<10>;
.reg .f64 %fd<10>;
"""
_numbers = itertools.count()


def run(body, *arguments, blocks=1, threads=32, shared=0):
    """Launch a kernel with the PTX in `body`. %rd0, %rd1, ... contain its arguments, and %r0
    contains the thread index. The shared variable `memory` has `shared` bytes."""
    name = f"kernel_{next(_numbers)}"
    parameters = [f".param .u64 {name}_{i}" for i in range(len(arguments))]
    text = ".version 9.0\n.target sm_90\n.address_size 64\n"
    text += f".visible .entry {name}(\n" + ",\n".join(parameters) + "\n)\n{\n" + _REGISTERS
    text += f".shared .align 4 .b8 memory[{shared}];\n" if shared else ""
    for i in range(len(arguments)):
        text += f"ld.param.u64 %rd{i}, [{name}_{i}];\n"
    executor().load(text + "mov.u32 %r0, %tid.x;\n" + body + "\nret;\n}\n")
    executor().launch(name, blocks, threads, *arguments)


def per_thread(body, threads=32, shared=0):
    """Run `body` in one block. Return the value of %r9 of each thread."""
    out = torch.zeros(threads, dtype=torch.int32)
    address = "mul.wide.u32 %rd9, %r0, 4;\nadd.s64 %rd9, %rd0, %rd9;\n"
    run(f"{body}\n{address}st.global.u32 [%rd9], %r9;", out, threads=threads, shared=shared)
    return out.tolist()
