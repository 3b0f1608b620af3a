"""Executes the PTX of the CUDA and Triton kernels on a CPU; see README.md."""
