"""dct_bench: the measurements behind the claims.

`dct-bench link` trains over links of a known rate, `dct-bench scale` predicts what no machine at
hand can run. Each subcommand is a folder: `add_parser` in its `arguments`, `run` in its `command`;
cli lists them.
"""
