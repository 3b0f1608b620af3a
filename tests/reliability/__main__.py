"""Runs thousands of random cases. Usage in tests/: python -m reliability PART.

The results file is written after each batch, and a later run resumes from it. The file lists all
failures. The exit status is 1 if it lists any.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from . import PARTS, ROOT, part


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m reliability",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--entry-point", help="run only this entry point")
    parser.add_argument("--count", type=int, help="cases per entry point")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=90, help="time limit for starting batches")
    parser.add_argument("--out", type=Path, help="default: build/reliability/PART.json")
    return parser.parse_args(arguments)


def batches(
    module: ModuleType, content: dict[str, Any], counts: Mapping[str, int], minutes: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the missing cases; yield (entry point, its results so far) after each batch."""
    end = time.monotonic() + 60 * minutes
    for entry_point, asked in counts.items():
        results = content["results"].setdefault(entry_point, {"done": 0, "failures": []})
        while results["done"] < asked and time.monotonic() < end:
            count = min(module.BATCH, asked - results["done"])
            found = module.run(entry_point, results["done"], count, content["seed"])
            results["done"] += count
            for name, value in found.items():
                if name.startswith("max_"):
                    results[name] = max(results.get(name, value), value)
                else:  # counts and lists of failures are added up
                    results[name] = results[name] + value if name in results else value
            yield entry_point, results


def run(options: argparse.Namespace) -> int:
    """Run the cases that are not in the file yet; return 1 if any case in the file failed."""
    module = part(options.part)
    if options.entry_point not in {None, *module.COUNTS}:
        names, got = ", ".join(module.COUNTS), options.entry_point
        sys.exit(f"--entry-point must be one of {names}, got {got}")
    out = options.out or ROOT / f"build/reliability/{options.part}.json"
    new = {"seed": options.seed, "results": {}}
    content = json.loads(out.read_text()) if out.exists() else new
    if content["seed"] != options.seed:
        sys.exit(f"{out} has seed {content['seed']}, not {options.seed}: pass a different --out")
    names = [name for name in module.COUNTS if options.entry_point in (None, name)]
    counts = {name: options.count or module.COUNTS[name] for name in names}
    out.parent.mkdir(parents=True, exist_ok=True)
    for entry_point, results in batches(module, content, counts, options.minutes):
        out.write_text(json.dumps(content, indent=1))
        print(f"{entry_point}: {results['done']:,} of {counts[entry_point]:,}", flush=True)
    failed = 0
    for entry_point, results in content["results"].items():
        failures = results["failures"]
        failed += len(failures)
        print(f"{entry_point}: {results['done']:,} run, {len(failures)} failed")
        for failure in failures[:10]:
            print(f"  case {failure['case']}: {failure['what']}")
    print(out)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(run(parse()))
