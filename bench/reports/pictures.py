"""docs/images/*.svg, drawn from results."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import kernels, links, trained
from .experiments import Experiment
from .pages import ROOT
from .svg import COLOURS, GREY, PALE, Line, Panel, chart, document, text

IMAGES = ROOT / "docs" / "images"
Experiments = Mapping[str, Experiment]


def render(experiments: Experiments) -> dict[Path, str]:
    """{path: text} of all pictures."""
    return {IMAGES / f"{draw.__name__}.svg": draw(experiments) for draw in PICTURES}


def step_time(experiments: Experiments) -> str:
    """Step time over a slow link, and what it costs in quality, of the same model."""
    (run,) = experiments["link_one_threshold"].runs
    quality = experiments["thresholds"].of_part("criteo")
    methods = trained.best([run for run in quality if not run["method"].endswith("before")])
    of_mode = {"bf16": "bf16", "topk": "topk:0.5%", "dct": "dct:0.5%"}
    seeds = len(methods["dense"])
    million = run["model"]["parameters"] / 1e6
    title = f"DLRM, {million:.2f} million parameters, 2 ranks on CPUs, 0.5 % of the entries sent"
    slowest = max(cell["step_ms"][1] for cell in run["cells"])
    left, bar, zero, unit = 150, 320, 690, 60_000  # the last: of a unit of log loss
    parts = [text(16, 26, title, 15, "font-weight='bold'")]
    parts.append(
        text(left, 50, "a step over a link of 100 Mbit/s: median time, bytes per rank", 12)
    )
    parts.append(text(zero - 40, 50, f"test log loss over float32's, {seeds} seeds", 12))
    below = 66 + 34 * len(run["cells"])
    for value, said in ((0, "0"), (0.001, "+0.001"), (0.002, "+0.002")):
        x = zero + unit * value
        parts.append(f"<path d='M{x:g} 60V{below}' stroke='{PALE if value else GREY}'/>")
        parts.append(text(x, below + 16, said, 11, f"text-anchor='middle' fill='{GREY}'"))
    for number, cell in enumerate(run["cells"]):
        y, ms = 68 + 34 * number, cell["step_ms"][1]
        ours = cell["mode"] == "dct"
        colour = COLOURS[2] if ours else COLOURS[5]
        bold = "font-weight='bold'" if ours else ""
        name = "DCT" if ours else links.NAMES[cell["mode"]]
        parts.append(text(left - 8, y + 17, name, 13, f"text-anchor='end' {bold}"))
        width = bar * ms / slowest
        parts.append(f"<rect x='{left}' y='{y}' width='{width:.1f}' height='24' fill='{colour}'/>")
        said = f"{ms:.1f} ms, {cell['payload_bytes']:,.0f} bytes"
        parts.append(text(left + width + 6, y + 17, said, 12, bold))
        if cell["mode"] in of_mode:
            over = trained.over(methods[of_mode[cell["mode"]]], methods["dense"])
            parts += _interval(over, zero, unit, y + 12, colour)
        elif cell["mode"] != "dense":
            parts.append(text(zero + 8, y + 17, "not measured", 11, f"fill='{GREY}'"))
    parts.append(text(zero - 40, below + 34, "bar: mean ± standard error; ring: worst seed", 11))
    parts.append(text(zero - 40, below + 50, "SGD, Criteo rows, 270 steps, simulated ranks", 11))
    return document(900, below + 62, title, parts)


def _interval(over: Sequence[float], zero: float, unit: float, y: float, colour: str) -> list[str]:
    error = statistics.stdev(over) / len(over) ** 0.5
    low, high = (zero + unit * (statistics.mean(over) + side * error) for side in (-1, 1))
    dot, ring = zero + unit * max(over), f"fill='#ffffff' stroke='{colour}' stroke-width='2'"
    return [
        f"<rect x='{low:.1f}' y='{y - 5}' width='{high - low:.1f}' height='10' fill='{colour}'/>",
        f"<circle cx='{dot:.1f}' cy='{y}' r='4' {ring}/>",
    ]


def thresholds(experiments: Experiments) -> str:
    methods = trained.best(experiments["thresholds"].of_part("criteo"))
    names = ("dense", "topk:0.5%", "dct:0.5% before", "dct:0.5%")
    lines = [
        Line(trained.label(name), _mean(methods[name], "test_curve", (0, 1))) for name in names
    ]
    title = f"DLRM on Criteo rows, SGD, 2 ranks, 0.5 %, means of {len(methods['dense'])} seeds"
    return chart(title, [Panel("", "step", "test log loss", lines)])


def dp_density_adamw(experiments: Experiments) -> str:
    runs = [r for r in experiments["dp_density"].runs if trained.problem(r) == "text-adamw"]
    methods = trained.best([run for run in runs if run["steps"] == 600], runs)
    names = ("dense", "bf16", "local:10%x10", "dct:10%", "topk:1%", "dct:1%", "powersgd")
    over_steps = [Line(trained.label(n), _mean(methods[n], "curve", (0, 2))[1:]) for n in names]
    over_bytes = [Line(trained.label(n), _mean(methods[n], "curve", (1, 2))[1:]) for n in names]
    panels = [
        Panel("over steps", "step", "training loss", over_steps),
        Panel("over bytes", "bytes that a rank has sent", "training loss", over_bytes, True),
    ]
    return chart("Transformer, AdamW, constant rate, 2 ranks, means of up to 3 seeds", panels)


def _mean(runs: Sequence[dict], key: str, columns: tuple[int, int]) -> list[tuple[float, float]]:
    """A curve's means over seeds."""
    points = zip(*(run[key] for run in runs), strict=True)
    return [tuple(statistics.mean(p[c] for p in seeds) for c in columns) for seeds in points]


def dp_transports(experiments: Experiments) -> str:
    panels = []
    for part, title in (
        ("kaggle", "Criteo rows, 310 steps"),
        ("generated", "generated rows, 312 steps"),
    ):
        methods = trained.best(experiments["dp_transports"].of_part(part))
        lines = []
        for kind in ("topk", "gather", "shard"):
            points = []
            for density in (0.1, 0.5, 1.0):
                over = trained.over(methods[f"{kind}:{density:g}%"], methods["dense"], "auc")
                points.append((density, statistics.mean(over)))
            lines.append(Line(trained.label(kind), points))
        panels.append(Panel(title, "density, %", "AUC over float32's", lines, True))
    return chart("DLRM, SGD, 2 ranks, means of 3 seeds, earlier thresholds", panels)


def kernels_by_size(experiments: Experiments) -> str:
    panels = []
    shown = {
        "mask_pack, float32": ("mask_pack", "float32 grad, float32 values", 0.01),
        "scatter_unpack, P=2": ("scatter_unpack", "P=2", 0.01),
    }
    names = {"copy": "copy of the bytes", "topk": "exact top-k", "dgc": "DGC", "eager": "eager"}
    for title, (op, case, density) in shown.items():
        runs = [
            run
            for run in experiments["kernels_cpu"].of_part("flat")
            if (run["op"], run["case"], run["density"]) == (op, case, density)
        ]
        runs.sort(key=lambda run: run["numel"])
        lines = []
        for name in (kernels.ours(runs[0]), *names):
            points = [(r["numel"], r["ms"][name]["median"]) for r in runs if name in r["ms"]]
            if points:
                lines.append(Line(names.get(name, "our kernel"), points))
        panels.append(Panel(title, "elements", "ms", lines, True, True))
    return chart("Kernels on 2 CPU threads, 1 % kept, medians", panels)


PICTURES: tuple[Callable[[Experiments], str], ...] = (
    step_time,
    thresholds,
    dp_density_adamw,
    dp_transports,
    kernels_by_size,
)
