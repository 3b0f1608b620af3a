"""bench/link.py: training over links of a known rate."""

import examples_path  # noqa: F401  (first)
