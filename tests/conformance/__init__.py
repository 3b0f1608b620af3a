"""Every backend against the oracle, bit for bit. A new backend is one entry in
`dct_kernels.testing.backends()`."""
