"""PTX, executed on a CPU: what nvcc makes of the CUDA kernels, and what Triton makes of its own.

Each is one more backend, "ptx-cuda" and "ptx-triton".

`parser` reads the text and `program` decodes it, by the opcodes of `operations`, `halves` and
`collectives`; `block` runs it on the `memory` whose accesses it checks, those of `matrices` among
them; `runtime` loads and launches, and `cudart` is what nvcc's launchers see of that. `module.cpp`
gives those to `launchers.py`, which has the ops, and `backend.py` calls both. `triton_backend.py`
has the ops of Triton, to which it is the driver of a GPU; `snippets.py` runs a few lines of PTX.

In lock-step `counts` counts what is executed; `machine_code` says what that is in machine code,
`counting` does it for `cases`, and `report` makes a table of it.
"""
