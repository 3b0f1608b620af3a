"""Repeats the public part of the DCT paper's recipe (arXiv 2010.08899) with different settings.

    python -m bench.experiments.paper --rows 1000000 --cuts gradients
    python -m bench.experiments.paper --data train.txt --cuts rows,columns --embedding-lr 1

The model is DLRM with embeddings of width 16. The bottom MLP has widths 13-512-256-64-16, including
its input. The layers of the top MLP have 512, 256 and 1 outputs. Training uses 2 ranks, SGD, a
learning rate of 0.1, and 128 rows per rank and step. Each row is used once.
examples/train_dlrm.py trains each setting of a cut. A cut names the tensors that are compressed:

    gradients   gradients of all weights; every rank has all weights
    rows        rows of the embedding tables, which are sharded
    columns     columns of the top MLP's hidden layers, which are split

Each finished setting has a folder in --out and is not repeated.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import files
from bench.cli import Parser, UsageError, count, exit_status, make_folder, positive, several
from bench.tables import difference, number, table, times

PROGRAM = Path(__file__).parents[2] / "examples" / "train_dlrm.py"
BASELINES = {"dense": "float32", "bf16": "bfloat16"}  # by mode
FRESH = "--modes dct"
FIXED = f"{FRESH} --refresh-every 1000"
ROWS = f"{FRESH} --format float32 --density 1"  # gradients are not compressed
# Options of train_dlrm.py for each cut and its settings.
PARALLEL = {"gradients": "data", "rows": "hybrid", "columns": "columns"}
ROW_SETTINGS = {
    "10 %": f"{ROWS} --row-density 0.1",
    "5 %": f"{ROWS} --row-density 0.05",
    "int4": f"{ROWS} --row-format int4",
}
SETTINGS: dict[str, dict[str, str]] = {
    "gradients": {
        f"{policy}, {percent} %": f"{given} --density {percent / 100}"
        for policy, given in (("fixed", FIXED), ("fresh", FRESH))
        for percent in (5, 1, 0.5)
    },
    "rows": ROW_SETTINGS
    | {
        "5 %; gradients fixed, 0.5 %": f"{FIXED} --density 0.005 --row-density 0.05",
        "int4; gradients fresh, 0.5 %": f"{FRESH} --density 0.005 --row-format int4",
    },
    "columns": ROW_SETTINGS | {"int8": f"{ROWS} --row-format int8"},
}


def train(options: argparse.Namespace) -> list[dict]:
    """Train the unfinished settings of --cuts. Return all runs."""
    names = ("data", "rows", "seeds", "embedding_lr")
    common = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
    found = []
    for cut in options.cuts:
        baselines = {"baselines": f"--modes {','.join(BASELINES)}"}
        for setting, arguments in (baselines | SETTINGS[cut]).items():
            folder = options.out / re.sub(r"\W+", "-", f"{cut} {setting}").strip("-")
            command = ["--parallel", PARALLEL[cut], *arguments.split()]
            command += [f"{name}={value}" for name, value in common.items() if value]
            finished = folder / "command.json"
            if not finished.exists() or json.loads(finished.read_text()) != command:
                program = [sys.executable, PROGRAM, *command, "--overwrite", "--out", folder]
                if subprocess.run(program).returncode:
                    raise UsageError(f"{PROGRAM.name} must succeed, got {' '.join(command)}")
                files.write_json(finished, command)
            modes = json.loads((folder / "summary.json").read_text())["modes"]
            for mode, each in modes.items():
                kept = {"cut": cut, "setting": BASELINES.get(mode, setting)}
                found += [kept | _kept(run) for run in each]
    return found


def _kept(run: dict) -> dict:
    sent = run["bytes_by_purpose"]
    rows = sent.get("rows", 0) + sent.get("rows back", 0)
    found = {name: run[name] for name in ("seed", "log_loss", "auc")}
    return found | {"bytes": {"gradients": sent["gradients"], "rows": rows}}


def report(runs: Sequence[dict], cut: str) -> str:
    """The table of a cut. Differences from float32 are computed per seed.

    Reduction factors count only the bytes that a setting compresses: gradients, rows or both.
    """
    settings: dict[str, list[dict]] = {}
    for run in runs:
        if run["cut"] == cut:
            settings.setdefault(run["setting"], []).append(run)
    dense = {run["seed"]: run for run in settings["float32"]}
    headings = ["setting", "gradients", "rows", "than float32", "than bfloat16"]
    for score in ("log loss", "AUC"):
        headings += [score, "vs. float32", "worst"]
    return table(headings, [[name, *_row(each, dense)] for name, each in settings.items()])


def _row(runs: Sequence[dict], dense: dict[int, dict]) -> list[str]:
    sent, whole = runs[0]["bytes"], dense[runs[0]["seed"]]["bytes"]
    fewer = [name for name in sent if sent[name] < whole[name]] or list(sent)
    factor = sum(whole[name] for name in fewer) / sum(sent[name] for name in fewer)
    cells = [
        number(sent["gradients"]),
        number(sent["rows"] or None),
        times(factor),
        times(factor / 2),
    ]
    for score, worst in (("log_loss", max), ("auc", min)):
        over = [run[score] - dense[run["seed"]][score] for run in runs]
        cells += [f"{statistics.mean(run[score] for run in runs):.4f}"]
        cells += [difference(over), f"{worst(over):+.4f}"] if any(over) else ["", ""]
    return cells


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m bench.experiments.paper", description=__doc__)
    add = parser.add_argument
    add("--cuts", type=several(str, SETTINGS), default=",".join(PARALLEL))
    add("--data", type=Path, metavar="FILE", help="rows in Criteo's layout")
    add("--rows", type=count, default=260_000, help="rows to generate; 20 %% are test rows")
    add("--embedding-lr", type=positive, help="learning rate of the tables (default: 0.1)")
    add("--seeds", type=count, default=3)
    add("--out", type=Path, default=Path("runs/paper"))
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    make_folder(options.out)
    runs = train(options)
    files.write_json(options.out / "runs.json", runs)
    for cut in options.cuts:
        print(f"{cut}\n\n{report(runs, cut)}\n")


if __name__ == "__main__":
    raise SystemExit(exit_status("paper", main))
