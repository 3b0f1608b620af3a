"""The Triton kernels compiled ahead of time, for GPUs that need not be there.

`python -m tests.aot [ARCHITECTURE ...]` prints a table of what came out.
"""
