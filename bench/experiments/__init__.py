"""Experiments: `cd bench && python -m experiments.NAME --help`."""

import examples_path  # noqa: F401  (first: they train what is there)
