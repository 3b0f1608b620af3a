"""Compiles the Triton kernels ahead of time, without a GPU."""
