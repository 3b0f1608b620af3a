"""bench/kernels.py: every op against a copy of its bytes, and against peers."""

import examples_path  # noqa: F401  (first)
