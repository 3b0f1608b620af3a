"""bench.kernels: compares each op with a copy of the same bytes and with other methods."""
