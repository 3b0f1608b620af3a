"""Tables of `dct-bench kernels` and bench/gpu: times beside a copy of the bytes that must move."""

import re
from collections.abc import Sequence

from .markdown import number, percent, table

OURS = ("cuda", "cpp")  # whichever was measured; the first is shown where both were
NOTE = (
    "*Of copy*: the time of a copy of the bytes that must move, in the same run, over the time of "
    "the op; the higher, the better. Peers: how many times longer they take. A time is a median, "
    "with 20 to 80 %."
)


def accepts(run: dict) -> bool:
    return {"op", "case", "ms"} <= run.keys()


def ours(run: dict) -> str:
    return next(name for name in OURS if name in run["ms"])


def of_copy(run: dict, name: str) -> str:
    return percent(run["ms"]["copy"]["median"] / run["ms"][name]["median"])


def peers(run: dict, left_out: Sequence[str] = ()) -> str:
    """Those that are no backend of ours, and how many times longer they take."""
    own = run["ms"][ours(run)]["median"]
    known = {"copy", "copy kernel", "eager", "cuda", "cpp", "triton", *left_out}
    return ", ".join(
        f"{name} {_times(ms['median'] / own)}"
        for name, ms in run["ms"].items()
        if name not in known
    )


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def milliseconds(run: dict) -> str:
    ms = run["ms"][ours(run)]
    return f"{ms['median']:.3g} ({ms['q20']:.3g}-{ms['q80']:.3g})"


def shape(run: dict) -> str:
    """Its case, without the number of rows or of samples that `numel` says."""
    case = re.sub(r"^\d{6,} samples, ", "", run["case"])
    return re.sub(r"^\[\d+, (\d+)\]", r"[B, \1]", case)


def render(runs: Sequence[dict]) -> str:
    """Every op and case at the largest size that it was measured at, and over sizes."""
    runs = [run for run in runs if not run.get("graphs")]
    largest: dict[tuple, dict] = {}
    for run in sorted(runs, key=lambda run: run["numel"]):
        largest[run["op"], shape(run), run["density"]] = run
    sizes = sorted({run["numel"] for run in runs})
    found = [_largest([run for run in runs if run in largest.values()])]
    if len(sizes) > 1:
        found.append(_over_sizes(runs, sizes))
    return "\n\n".join(found)


def _density(run: dict) -> str:
    return "" if run["density"] is None else f"{100 * run['density']:g} %"


def _largest(runs: Sequence[dict]) -> str:
    headings = ["op", "case", "kept", "elements", "MB", "ms", "of copy", "Triton, of copy"]
    headings += ["eager", "peers"]
    rows = []
    for run in runs:
        own = run["ms"][ours(run)]["median"]
        row = [f"`{run['op']}`", shape(run), _density(run), number(run["numel"])]
        row += [f"{run['bytes'] / 1e6:,.1f}", milliseconds(run), of_copy(run, ours(run))]
        row.append(of_copy(run, "triton") if "triton" in run["ms"] else "")
        row.append(_times(run["ms"]["eager"]["median"] / own) if "eager" in run["ms"] else "")
        rows.append([*row, peers(run)])
    return table(headings, rows)


def _over_sizes(runs: Sequence[dict], sizes: Sequence[int]) -> str:
    by_case: dict[tuple, dict[int, str]] = {}
    for run in runs:
        key = (f"`{run['op']}`", shape(run), _density(run))
        by_case.setdefault(key, {})[run["numel"]] = of_copy(run, ours(run))
    shown = {key: found for key, found in by_case.items() if len(found) > 1}
    headings = ["of copy, elements", "case", "kept", *(f"{size:,}" for size in sizes)]
    return table(headings, [[*k, *(v.get(size, "") for size in sizes)] for k, v in shown.items()])
