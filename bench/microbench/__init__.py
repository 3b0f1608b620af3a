"""Implements bench.kernels, which compares the ops with a copy and with other methods."""
