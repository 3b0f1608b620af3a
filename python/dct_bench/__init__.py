"""dct_bench: the measurements behind the claims.

`dct-bench link` trains over links of a known rate, `dct-bench scale` predicts what no machine at
hand can run. Each subcommand is one module with `add_parser` and `run`; cli lists them.
"""
