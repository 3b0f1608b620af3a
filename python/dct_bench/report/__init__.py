"""What `dct-bench kernels` measured, drawn."""
