"""What the contract says, in plain Python and numpy, sharing no code with any backend.

Numbers are numpy float32 arrays; a dtype is its name ("float32", "bfloat16" or "float16"), and an
array of that dtype is held as its raw bits (`floats.narrow`, `floats.widen`).
"""
