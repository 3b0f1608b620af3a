"""The recipe that is public of the DCT paper (arXiv 2010.08899), trained by examples/train_dlrm.py.

    python -m bench.experiments.paper
    python -m bench.experiments.paper --data train.txt --settings "fresh, 0.5 %" "fixed, 0.5 %"

DLRM with embeddings of 16 and MLPs of 13-512-256-64-16 and 512-256-1, SGD with a rate of 0.1, 128
rows per rank and step, each row read once. Every setting is a comparison of train_dlrm.py, with a
folder in --out. Finished settings are not repeated. The table compares each run with float32's of
the same seed and cut.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import files
from bench.cli import Parser, UsageError, count, exit_status, make_folder
from bench.tables import difference, number, table, times

PROGRAM = Path(__file__).parents[2] / "examples" / "train_dlrm.py"
DCT = "--modes dct"
FIXED = f"{DCT} --policy fixed --refresh-every 1000"
HYBRID, COLUMNS = "--parallel hybrid", "--parallel columns"
EXACT = f"{DCT} --format float32 --density 1"  # gradients
BASELINES = "--modes dense,bf16"
# By cut: {setting: options of train_dlrm.py}. The first setting has the baselines.
CUTS: dict[str, dict[str, str]] = {
    "data parallel": {
        "dense": BASELINES,
        "fixed, 5 %": f"{FIXED} --density 0.05",
        "fixed, 1 %": f"{FIXED} --density 0.01",
        "fixed, 0.5 %": f"{FIXED} --density 0.005",
        "fresh, 5 %": f"{DCT} --density 0.05",
        "fresh, 1 %": f"{DCT} --density 0.01",
        "fresh, 0.5 %": f"{DCT} --density 0.005",
    },
    "tables sharded": {
        "dense, rows": f"{HYBRID} {BASELINES}",
        "rows, 10 %": f"{HYBRID} {EXACT} --row-density 0.1",
        "rows, 5 %": f"{HYBRID} {EXACT} --row-density 0.05",
        "rows, int4": f"{HYBRID} {EXACT} --row-format int4",
        "fixed, 0.5 %, and rows, 5 %": f"{HYBRID} {FIXED} --density 0.005 --row-density 0.05",
        "fresh, 0.5 %, and rows, int4": f"{HYBRID} {DCT} --density 0.005 --row-format int4",
    },
    "top MLP cut by columns": {
        "dense, columns": f"{COLUMNS} {BASELINES}",
        "columns, 10 %": f"{COLUMNS} {EXACT} --row-density 0.1",
        "columns, 5 %": f"{COLUMNS} {EXACT} --row-density 0.05",
        "columns, int4": f"{COLUMNS} {EXACT} --row-format int4",
    },
}
SETTINGS = {name: given for settings in CUTS.values() for name, given in settings.items()}
