"""bench/scale.py: a cost model for what no machine at hand can run."""

import examples_path  # noqa: F401  (first)
