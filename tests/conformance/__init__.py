"""Compares every backend with the oracle, bit for bit. To test a new backend, add it to
`dct_kernels.testing.backends()`."""
