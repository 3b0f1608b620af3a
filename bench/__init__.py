"""Benchmarks and experiments, run from the root of a checkout."""
