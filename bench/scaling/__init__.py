"""bench.scale: the cost model."""
