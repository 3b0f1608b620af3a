"""Formats table rows of bench.kernels, with times relative to a copy of as many bytes."""

import re

from bench.tables import header, number

COPY, COPY_KERNEL = "copy", "copy kernel"
OURS = ("cuda", "triton", "cpp", "eager")  # a row shows the first of these that was timed
HEADINGS = ("op", "case", "kept", "elements", "MB", "ms", "of copy", "Triton, of copy", "eager")
HEADINGS += ("peers",)
HEADER = header(HEADINGS)


def row(run: dict) -> list[str]:
    """The table row of one case; its columns are HEADINGS."""
    ms, best = run["ms"], _best(run)
    longer = {name: _times(ms[name]["median"] / ms[best]["median"]) for name in ms}
    peers = [name for name in ms if name not in {COPY, COPY_KERNEL, *OURS}]
    return [
        *(f"`{run['op']}`", _case(run), _kept(run), number(run["numel"])),
        f"{run['bytes'] / 1e6:,.1f}",
        f"{ms[best]['median']:.3g} ({ms[best]['q20']:.3g}-{ms[best]['q80']:.3g})",
        _of_copy(run, best),
        _of_copy(run, "triton") if "triton" in ms and best != "triton" else "",
        longer.get("eager", ""),
        ", ".join(f"{name} {longer[name]}" for name in peers),
    ]


def _best(run: dict) -> str:
    return next(name for name in OURS if name in run["ms"])


def _of_copy(run: dict, name: str) -> str:
    return f"{100 * run['ms'][COPY]['median'] / run['ms'][name]['median']:.0f} %"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def _case(run: dict) -> str:
    """The name of the case without the number of samples, which follows from `numel`."""
    return re.sub(r"^\d{6,} samples, ", "", run["case"])


def _kept(run: dict) -> str:
    return "" if run["density"] is None else f"{100 * run['density']:g} %"
