"""`dct-bench scale`: a cost model for what no machine at hand can run."""
