"""Charts as SVG text: the same on every machine, so that a test can compare them.

White, so that they read on light and dark pages. Colours are Okabe and Ito's, which colour-blind
readers can tell apart, and lines differ in their dashes as well. Legends stand beside the data.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("", "", "", "6 3", "6 3", "2 2", "2 2")
GREY, PALE = "#555555", "#dddddd"
FONT = "font-family='Helvetica, Arial, sans-serif'"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, LEGEND = 360, 300, 66, 44, 46, 230  # of a panel, and beside it


class Line(NamedTuple):
    label: str
    points: Sequence[tuple[float, float]]


class Panel(NamedTuple):
    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


def text(x: float, y: float, said: str, size: int = 12, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' {FONT} {more}>{escape(said)}</text>"


def document(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' "
        f"width='{width:g}' height='{height:g}' role='img'>"
    )
    paper = f"<rect width='{width:g}' height='{height:g}' rx='6' fill='#ffffff'/>"
    return "\n".join([head, f"<title>{escape(title)}</title>", paper, *parts, "</svg>", ""])


def chart(title: str, panels: Sequence[Panel]) -> str:
    """Panels side by side, with one legend: a label has one colour in all of them."""
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    width = len(panels) * WIDTH + LEGEND
    parts = [text(12, 22, title, 14, "font-weight='bold'")]
    for number, panel in enumerate(panels):
        parts += _panel(panel, number * WIDTH, labels)
    x = len(panels) * WIDTH + 14
    for number, label in enumerate(labels):
        y = TOP + 22 + 20 * number
        parts += [_stroke(f"M{x} {y - 4}h24", number), text(x + 30, y, label, 11)]
    return document(width, HEIGHT, title, parts)


def _stroke(path: str, number: int) -> str:
    dash = f" stroke-dasharray='{DASHES[number]}'" if DASHES[number] else ""
    return f"<path d='{path}' fill='none' stroke='{COLOURS[number]}' stroke-width='1.8'{dash}/>"


def _panel(panel: Panel, left: float, labels: Sequence[str]) -> list[str]:
    xs, ys = zip(*(point for line in panel.lines for point in line.points), strict=True)
    low, high = left + LEFT, left + WIDTH - 14
    top, bottom = TOP + 18, HEIGHT - BOTTOM
    to_x = _scale(min(xs), max(xs), low, high, panel.log_x)
    margin = 0 if panel.log_y else 0.04 * (max(ys) - min(ys))
    to_y = _scale(min(ys) - margin, max(ys) + margin, bottom, top, panel.log_y)
    parts = [text(low, TOP + 8, panel.title, 12)]
    for value, said in _ticks(min(xs), max(xs), panel.log_x):
        parts.append(f"<path d='M{to_x(value):.1f} {bottom}V{top}' stroke='{PALE}'/>")
        parts.append(text(to_x(value), bottom + 16, said, 11, "text-anchor='middle'"))
    for value, said in _ticks(min(ys), max(ys), panel.log_y):
        parts.append(f"<path d='M{low} {to_y(value):.1f}H{high}' stroke='{PALE}'/>")
        parts.append(text(low - 6, to_y(value) + 4, said, 11, "text-anchor='end'"))
    middle = (low + high) / 2
    parts.append(text(middle, HEIGHT - 10, panel.x, 12, f"text-anchor='middle' fill='{GREY}'"))
    at, centre = left + 14, (top + bottom) / 2
    turned = f"text-anchor='middle' fill='{GREY}' transform='rotate(-90 {at} {centre})'"
    parts.append(text(at, centre, panel.y, 12, turned))
    for line in panel.lines:
        path = "L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in line.points)
        parts.append(_stroke(f"M{path}", labels.index(line.label)))
    return parts


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Callable:
    def to(value: float) -> float:
        a, b, c = map(math.log, (low, high, value)) if log else (low, high, value)
        return start + (end - start) * (c - a) / (b - a)

    return to


def _ticks(low: float, high: float, log: bool) -> list[tuple[float, str]]:
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high / low < 50 else (1,)
        values = [step * 10.0**decade for decade in decades for step in steps]
    else:
        rough = (high - low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        values = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [(value, _said(value)) for value in values if low <= value <= high]


def _said(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:.6g}"
