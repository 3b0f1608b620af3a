"""python -m reliability PART, in tests/: faults by the thousand, of one kind.

Goes on where the file left off, and writes it after every batch. Exits with 1 if any case failed;
the file says which, and how. Copied to bench/results/DATE-MACHINE it is on docs/results and in
docs/design/reliability.md, once the pages are made (in bench/: python -m pages).
"""

import argparse
import os
import sys
from pathlib import Path

from rich import progress

from dlrm.command_line import Formatter, Parser, exit_status
from dlrm.errors import UsageError

from . import PARTS, PATHS, ROOT, campaign, part


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m reliability", description=__doc__, formatter_class=Formatter)
    parser.add_argument("part", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--door", help="this one only")
    parser.add_argument("--count", type=int, help="cases at each door; the part's own by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=90, help="no batch begins after so many")
    parser.add_argument("--out", type=Path, help="build/reliability/reliability_PART.json")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Of a part's cases those that are not in the file yet; 1 if any in the file failed."""
    # Ranks are forked from a process that begins anew, in tests/, where there is a dlrm as well.
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    module = part(options.part)
    if options.door not in {None, *module.COUNTS}:
        raise UsageError(f"--door must be of {', '.join(module.COUNTS)}, got {options.door}")
    doors = [door for door in module.COUNTS if options.door in (None, door)]
    counts = {door: options.count or module.COUNTS[door] for door in doors}
    out = options.out or ROOT / f"build/reliability/reliability_{options.part}.json"
    content = campaign.read(out, module, options.seed)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns) as bars:
        tasks = {door: bars.add_task(door, total=count) for door, count in counts.items()}
        for done in campaign.batches(module, content, counts, options.minutes):
            campaign.write(out, content)
            said = f"{done['door']}, {done['failed']} failed" if done["failed"] else done["door"]
            bars.update(tasks[done["door"]], completed=done["done"], description=said)
    for run in content["runs"]:
        print(f"{run['door']}: {run['done']:,} of {run['asked']:,}, {run['failed']} failed")
        for failure in run["failures"][:10]:
            print(f"  case {failure['case']}: {failure['what']}")
    print(out)
    return 1 if any(run["failed"] for run in content["runs"]) else 0


if __name__ == "__main__":
    sys.exit(exit_status("python -m reliability", lambda: run(parse())))
