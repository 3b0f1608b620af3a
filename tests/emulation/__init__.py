"""The CUDA sources compiled by g++ and run by fibers, one per CUDA thread: one more backend.

`include/` stands in for CUDA's headers, `emulator.cpp` schedules, `backend.py` has the ops.
"""
