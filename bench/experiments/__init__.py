"""Experiments: `python -m bench.experiments.NAME --help`."""
