"""What nvcc makes of the CUDA kernels, PTX, executed on a CPU: one more backend.

`parser`, `program` and `operations` make of the text what `block` runs, on the `memory` whose
accesses it checks; `runtime` is what launchers see of CUDA; `backend.py` has the seven ops.
"""
