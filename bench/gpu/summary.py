"""Adds what came out of a stage to summary.json, and prints it.

python bench/gpu/summary.py OUT STAGE STATUS LIMIT START END
"""

import json
import sys
from pathlib import Path


def message(log: Path, status: int, limit: str) -> str:
    """The last line of the log, which every stage makes one that says it all."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "nothing was printed"
    return f"stopped after {limit} s; last: {last}" if status in (124, 137) else last


def main() -> None:
    out, stage, status, limit, start, end = sys.argv[1:]
    path = Path(out, "summary.json")
    stages = json.loads(path.read_text()) if path.exists() else []
    result = {
        "stage": stage,
        "rc": int(status),
        "seconds": round(float(end) - float(start), 1),
        "message": message(Path(out, f"{stage}.log"), int(status), limit),
    }
    path.write_text(json.dumps([*stages, result], indent=1) + "\n")
    verdict = "passed" if result["rc"] == 0 else f"FAILED {status}"
    print(f"{stage:20} {verdict:10} {result['seconds']:6.1f} s  {result['message']}", flush=True)


if __name__ == "__main__":
    main()
