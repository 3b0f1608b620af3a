"""Implements bench.kernels, which compares the speed of ops with a copy and other methods."""
