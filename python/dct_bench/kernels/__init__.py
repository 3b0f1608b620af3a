"""`dct-bench kernels`: every op against a copy of its bytes, and against peers."""
