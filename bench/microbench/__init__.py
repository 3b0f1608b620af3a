"""bench.kernels: every op beside a copy of its bytes, and beside peers."""
