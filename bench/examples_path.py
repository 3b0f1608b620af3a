"""Puts examples/ on the path: what trains the click model imports this before it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
