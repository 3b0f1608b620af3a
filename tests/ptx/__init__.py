"""What nvcc makes of the CUDA kernels, PTX, executed on a CPU: one more backend.

`parser` reads the text and `program` decodes it, by the opcodes of `operations` and `collectives`;
`block` runs it on the `memory` whose accesses it checks; `runtime` is what launchers see of CUDA.
`backend.py` has the seven ops, `snippets.py` runs a few lines of PTX.
"""
