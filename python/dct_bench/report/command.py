"""dct-bench report: tables and plots of what `dct-bench kernels` measured."""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dct_dlrm.errors import UsageError

from ..kernels.command import COPY, COPY_KERNEL, HEADER, OURS, lines
from ..scale.kernel_rates import read_json

RESULT = {"op", "case", "numel", "density", "bytes", "ms"}
PROVENANCE = {"date", "cpu", "gpu", "torch"}


def run(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    results, about = _load(folder)
    try:
        _write(folder, results, about)
    except OSError as error:
        rule = "DIR must be a folder that can be written to"
        raise UsageError(f"{rule}, got {folder}: {error}") from None
    print(f"in {folder}: report.md, of_copy.png, by_size.png, by_density.png")
    return 0


def _load(folder: Path) -> tuple[list[dict], list[str]]:
    """Results of all files, and a line about each."""
    if not os.path.isdir(folder):
        raise UsageError(f"DIR must be a folder, got {folder}")
    found = {path: read_json(path) for path in sorted(folder.glob("*.json")) if _is_ours(path)}
    if not found:
        raise UsageError(f"{folder} must hold JSON of `dct-bench kernels`, found none")
    # Each once: what was replayed from a graph was measured without one as well.
    results = [
        result
        for content in found.values()
        for result in content["results"]
        if not result.get("graphs")
    ]
    about = [
        f"{path.name}: {made['gpu'] or made['cpu']}, torch {made['torch']}, {made['date']}"
        for path, made in ((path, content["provenance"]) for path, content in found.items())
    ]
    return results, about


def _write(folder: Path, results: list[dict], about: list[str]) -> None:
    text = [*about, "", *HEADER, *(line for result in results for line in lines(result))]
    (folder / "report.md").write_text("\n".join(text) + "\n")
    _save(folder / "of_copy.png", results, _of_copy, _largest)
    _save(folder / "by_size.png", results, _over("numel", "elements"), _densest_first)
    _save(folder / "by_density.png", results, _over("density", "density"), _largest_of_densities)


def _is_ours(path: Path) -> bool:
    try:
        content = read_json(path)
    except UsageError:
        return False
    results, made = content.get("results"), content.get("provenance")
    if not (isinstance(results, list) and results and _has(made, PROVENANCE)):
        return False
    return all(_has(result, RESULT) and _has(result["ms"], {COPY}) for result in results)


def _has(value: object, keys: set[str]) -> bool:
    return isinstance(value, dict) and keys <= value.keys()


def _largest(results: list[dict]) -> list[dict]:
    most = max(result["numel"] for result in results)
    return [result for result in results if result["numel"] == most]


def _largest_of_densities(results: list[dict]) -> list[dict]:
    return [result for result in _largest(results) if result["density"] is not None]


def _densest_first(results: list[dict]) -> list[dict]:
    """Of one density, the one measured at most sizes, or of none."""
    densities = [result["density"] for result in results if result["density"] is not None]
    usual = max(set(densities), key=densities.count, default=None)
    return [result for result in results if result["density"] in (usual, None)]


def _of_copy(axes: Axes, case: str, results: list[dict]) -> None:
    ms = results[0]["ms"]
    copy = min(ms[name]["median"] for name in (COPY, COPY_KERNEL) if name in ms)
    names = [name for name in ms if name != COPY]
    axes.barh(names, [100 * copy / ms[name]["median"] for name in names])
    axes.axvline(100, color="black", linewidth=1)
    axes.set(title=case, xlabel="% of a copy of the same bytes")


def _over(key: str, label: str) -> Callable[[Axes, str, list[dict]], None]:
    def draw(axes: Axes, case: str, results: list[dict]) -> None:
        for name in dict.fromkeys(name for result in results for name in result["ms"]):
            points = [(r[key], r["ms"][name]) for r in results if name in r["ms"]]
            points.sort(key=lambda point: point[0])
            x = [value for value, _ in points]
            style = "-" if name in OURS else "--"
            axes.plot(x, [ms["median"] for _, ms in points], style, marker="o", label=name)
            low, high = [ms["q20"] for _, ms in points], [ms["q80"] for _, ms in points]
            axes.fill_between(x, low, high, alpha=0.15)
        axes.set(title=case, xlabel=label, ylabel="ms", xscale="log", yscale="log")
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
        axes.grid(alpha=0.3)

    return draw


def _save(
    path: Path,
    results: list[dict],
    draw: Callable[[Axes, str, list[dict]], None],
    select: Callable[[list[dict]], list[dict]],
) -> None:
    """A panel per op and case; of rows, however many there are."""
    cases: dict[str, list[dict]] = {}
    for result in results:
        detail = re.sub(r"^\[\d+, (\d+)\]", r"width \1", result["case"])
        cases.setdefault(f"{result['op']}\n{detail}", []).append(result)
    cases = {case: chosen for case, of_case in cases.items() if (chosen := select(of_case))}
    columns = min(len(cases), 4) or 1
    rows = -(-len(cases) // columns) or 1
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes in panels:
        axes.set_visible(False)
    for axes, (case, of_case) in zip(figure.axes, cases.items(), strict=False):
        axes.set_visible(True)
        draw(axes, case, of_case)
    figure.savefig(path, dpi=110)
