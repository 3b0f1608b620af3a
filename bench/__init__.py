"""The laboratory: benchmarks and experiments, run from the root of a checkout."""
