"""Microbenchmarks: every op beside a copy of the bytes that must move, and beside peers.

python bench/kernels.py --help
"""

import sys

import cli

if __name__ == "__main__":
    sys.exit(cli.main("kernels"))
