"""The ops in plain Python and numpy, without code of any backend.

Numbers are numpy float32 arrays. A dtype is given by name ("float32", "bfloat16" or "float16"), and
an array of that dtype holds raw bits (`floats.narrow`, `floats.widen`).
"""
