"""Benchmarks and experiments, run from the root of a checkout."""

import sys
from pathlib import Path

# The programs in examples/ import `dlrm` and `wire_meter` by these names.
sys.path.append(str(Path(__file__).parents[1] / "examples"))
