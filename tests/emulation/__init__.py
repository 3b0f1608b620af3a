"""The CUDA sources compiled by g++ and run by fibers, one per CUDA thread: one more backend.

Frozen: kernels must pass it, but it gets no new features, and goes where it stands in the way of a
kernel. tests/ptx comes first (docs/design/verification.md says why).

`include/` stands in for CUDA's headers, `emulator.cpp` schedules, `emulated.py` has the ops.
"""
