"""Compiles the Triton kernels ahead of time, for GPUs that need not be there."""
