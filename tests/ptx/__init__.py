"""What nvcc makes of the CUDA kernels, PTX, executed on a CPU: one more backend.

`parser` reads the text and `program` decodes it, by the opcodes of `operations` and `collectives`;
`block` runs it on the `memory` whose accesses it checks; `runtime` is what launchers see of CUDA.
`backend.py` has the ops, `snippets.py` runs a few lines of PTX.

In lock-step `counts` counts what is executed; `machine_code` and `waits` say what that is in
machine code, `counting` does it for `cases`, `roofline` makes times of it, and `report` tables.
"""
