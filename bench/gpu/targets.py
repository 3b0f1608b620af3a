"""Which targets a run met: targets.md of bench.json, printed.

    python bench/gpu/targets.py OUT

A call is to take no longer than a copy of the bytes that it must move, measured in the same run, or
than its floor, whichever is longer, over LEAST. The floor is computed: launches, and the pipe of
instructions that binds, at the clock that was seen while `bench` ran. It is known for what
tests/ptx counts, on the GPUs of floors.py; elsewhere the copy alone counts, and less of it is
asked.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import floors

from dct_bench.kernels import command as kernels

LEAST = 0.9
# Of a copy's speed where no floor is known: many payloads are scattered writes, and row_pack is
# bound by the search for a row's k-th magnitude.
LEAST_OF_COPY = {"P=64": 0.75, "row_pack": 0.7}
FASTER_THAN = {"topk": 20, "dgc": 5}  # at the largest size and this, if the floor allows it
SMALL = 2**20
IN_A_GRAPH = ("float32 grad, float32 values", "bfloat16 grad, bfloat16 values")
SAMPLING = 0.03  # of mask_pack's time


class Target(NamedTuple):
    what: str
    asked: str
    measured: float
    met: bool
    copy_ms: float
    floor_ms: float | None


def targets(
    results: list[dict], gpu: str | None, clock: float | None = None, ours: str = "cuda"
) -> Iterator[Target]:
    """Of what was measured."""

    def ms(result: dict, *names: str) -> float:
        return min(result["ms"][name]["median"] for name in names if name in result["ms"])

    def copy(result: dict) -> float:
        return ms(result, kernels.COPY, kernels.COPY_KERNEL)

    def of_floor(name: str, result: dict) -> Target:
        floor = floors.floor_ms(result, gpu, clock)
        least = LEAST_OF_COPY.get(result["case"], LEAST_OF_COPY.get(result["op"], LEAST))
        least = least if floor is None else LEAST
        share = max(copy(result), floor or 0.0) / ms(result, ours)
        return Target(name, f">= {least}", share, share >= least, copy(result), floor)

    def faster(result: dict) -> Iterator[Target]:
        floor = floors.floor_ms(result, gpu, clock)
        for peer, times in FASTER_THAN.items():
            if peer in result["ms"]:
                asked = min(times, LEAST * ms(result, peer) / max(copy(result), floor or 0.0))
                measured = ms(result, peer) / ms(result, ours)
                name = f"{_name(result)}, times faster than {peer}"
                met = measured >= asked
                yield Target(name, f">= {asked:.1f}", measured, met, copy(result), floor)

    results = [result for result in results if ours in result["ms"]]
    packs = [r for r in results if r["op"] == "mask_pack" and r["density"] == 0.01]
    called = [result for result in packs if not result["graphs"]]
    largest = max((result["numel"] for result in called), default=0)
    for result in results:
        at_largest = result["numel"] == largest and result["density"] == 0.01
        rows = result["op"].startswith("row")
        if result["op"] == "sample_threshold" or result["graphs"] or not (at_largest or rows):
            continue
        yield of_floor(_name(result), result)
    for result in packs:
        if result["graphs"] and result["case"] in IN_A_GRAPH and result["numel"] >= 2**22:
            yield of_floor(f"{_name(result)}, in a graph", result)
    whole = [result for result in called if result["case"] == IN_A_GRAPH[0]]
    for result in whole:
        if result["numel"] in (largest, SMALL):
            yield from faster(result)
    for pack in whole:
        for result in results:
            same = (result["op"], result["numel"]) == ("sample_threshold", largest)
            if same and pack["numel"] == largest and result["density"] == 0.01:
                share = ms(result, ours) / ms(pack, ours)
                name = f"{_name(result)}, of mask_pack's time"
                yield Target(name, f"<= {SAMPLING}", share, share <= SAMPLING, copy(result), None)


def table(judged: list[Target]) -> list[str]:
    """What is not met stands last, where it is seen first."""
    lines = ["| target | asked | measured | met | copy, us | floor, us, computed |"]
    lines.append("|---|---|---|---|---|---|")
    for target in sorted(judged, key=lambda target: not target.met):
        floor = "" if target.floor_ms is None else f"{1e3 * target.floor_ms:,.1f}"
        met = "yes" if target.met else "NO"
        measured = f"{target.asked} | {target.measured:.3f} | {met} | {1e3 * target.copy_ms:,.1f}"
        lines.append(f"| {target.what} | {measured} | {floor} |")
    return lines


def clock_of(environment: dict) -> float | None:
    """In Hz, of the multiprocessors while `bench` kept them busy."""
    polled = environment.get("clocks", {}).get("bench")
    return None if polled is None else 1e6 * polled["sm_mhz"]["median"]


def _name(result: dict) -> str:
    numel = "" if result["op"].startswith("row") else f" {result['numel']:,}"
    return f"{result['op']}{numel} {result['case']}"


def main() -> None:
    out = Path(sys.argv[1])
    if not (out / "bench.json").exists():
        raise SystemExit("bench measured nothing: no targets")
    content = json.loads((out / "bench.json").read_text())
    path = out / "environment.json"
    clock = clock_of(json.loads(path.read_text())) if path.exists() else None
    about = content["provenance"]
    judged = list(targets(content["results"], about["gpu"], clock))
    said = f"{about['gpu'] or about['cpu']}, torch {about['torch']}, "
    said += "SM clock not known" if clock is None else f"SM clock {clock / 1e6:,.0f} MHz"
    met = f"{sum(target.met for target in judged)} of {len(judged)} targets met"
    lines = [said, "", *table(judged), "", met]
    (out / "targets.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
