"""Adds what came out of a stage to summary.json, and prints it.

python bench/gpu/summary.py OUT STAGE STATUS LIMIT START END

STATUS none: there was no time left to begin it.
"""

import json
import sys
from pathlib import Path


def message(log: Path, status: str, limit: str) -> str:
    """The last line of the log, which every stage makes one that says it all."""
    if status == "none":
        return "no time was left"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "nothing was printed"
    return f"stopped after {limit} s; last: {last}" if status in ("124", "137") else last


def main() -> None:
    out, stage, status, limit, start, end = sys.argv[1:]
    path = Path(out, "summary.json")
    stages = json.loads(path.read_text()) if path.exists() else []
    result = {
        "stage": stage,
        "rc": None if status == "none" else int(status),
        "start": round(float(start), 3),
        "seconds": round(float(end) - float(start), 1),
        "message": message(Path(out, f"{stage}.log"), status, limit),
    }
    path.write_text(json.dumps([*stages, result], indent=1) + "\n")
    verdict = {None: "not begun", 0: "passed"}.get(result["rc"], f"FAILED {status}")
    print(f"{stage:22} {verdict:10} {result['seconds']:6.1f} s  {result['message']}", flush=True)


if __name__ == "__main__":
    main()
