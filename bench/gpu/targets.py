"""bench.json and bench.md: what was measured, and which targets it meets."""

import json
from collections.abc import Iterator
from pathlib import Path

import predictions
import torch

from dct_bench.kernels import command as kernels

# Of a copy's speed, by op or case, where it is not 0.9: many payloads are scattered writes, and
# row_pack is bound by the search for a row's k-th magnitude.
LEAST = {"P=64": 0.75, "row_pack": 0.7}

Target = tuple[str, str, float, bool, float | None]


def targets(results: list[dict], ours: str, gpu: str | None) -> Iterator[Target]:
    """(what, target, measured, whether met, what was computed for it), of what was measured."""

    def ms(result: dict, *names: str) -> float:
        return min(result["ms"][name]["median"] for name in names if name in result["ms"])

    def of_copy(result: dict) -> float:
        return ms(result, kernels.COPY, kernels.COPY_KERNEL) / ms(result, ours)

    called = [result for result in results if not result["graphs"]]
    at_most = max((result["numel"] for result in called if result["op"] == "mask_pack"), default=0)
    found: dict[str, dict] = {}
    for result in called:
        at_largest = result["numel"] == at_most and result["density"] == 0.01
        if at_largest or result["op"].startswith("row"):
            found[f"{result['op']} {result['case']}"] = result
    pack = found.get("mask_pack float32 grad, float32 values")
    for name, result in found.items():
        least = LEAST.get(result["case"], LEAST.get(result["op"], 0.9))
        if result["op"] != "sample_threshold":
            measured, computed = of_copy(result), predictions.of_copy(result, gpu)
            yield f"{name}, of copy", f">= {least}", measured, measured >= least, computed
        elif pack:
            share = ms(result, ours) / ms(pack, ours)
            yield f"{name}, of mask_pack's time", "<= 0.03", share, share <= 0.03, None
    for peer, least in (("topk", 20), ("dgc", 5)):
        if pack and peer in pack["ms"]:
            faster = ms(pack, peer) / ms(pack, ours)
            yield (
                f"mask_pack, times faster than {peer}",
                f">= {least}",
                faster,
                faster >= least,
                None,
            )


def write(out: Path, about: dict, results: list[dict], ours: str) -> str:
    """bench.json and bench.md; a sentence about the targets."""
    content = {"torch": torch.__version__, "provenance": about, "results": results}
    (out / "bench.json").write_text(json.dumps(content, indent=1))
    judged = list(targets(results, ours, about["gpu"]))
    lines = [f"{about['gpu'] or about['cpu']}, torch {about['torch']}", ""]
    lines += ["| target | asked | measured | met | computed |", "|---|---|---|---|---|"]
    for what, asked, measured, met, computed in judged:
        beside = "" if computed is None else f"{computed:.3f}"
        lines.append(f"| {what} | {asked} | {measured:.3f} | {'yes' if met else 'NO'} | {beside} |")
    lines += ["", *kernels.HEADER]
    for result in results:
        suffix = " in a graph |" if result["graphs"] else " |"
        lines += [line.removesuffix(" |") + suffix for line in kernels.lines(result)]
    (out / "bench.md").write_text("\n".join(lines) + "\n")
    return f"{sum(met for _, _, _, met, _ in judged)} of {len(judged)} targets met"
