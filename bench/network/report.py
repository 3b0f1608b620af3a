"""Tables of a run of bench/link.py, in Markdown, and where DCT stops paying."""

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rates import describe_rate
from tables import number, table, times

from .cells import Cell
from .methods import METHODS

# Ethernet 14, IPv4 20, TCP 20 and its timestamps 12, of every packet; acknowledgements are packets
# without payload.
HEADER_BYTES = 66
WARM_UP_SECONDS = 3  # of a cell, about
BYTES_AT = 1e9  # the rate that bytes are shown at, where it was measured
PURPOSES = {
    "counts": "counts",
    "ids": "ids",
    "mp_forward": "rows forward",
    "mp_backward": "rows backward",
    "dp": "MLPs' gradients",
}
NOTE = (
    "A time is the median of a step, as long as its slowest rank, with 20 to 80 %. Bytes are per "
    "rank and step: *formula* is what it hands to collectives, or what of it leaves its node; "
    "*counter* is its interface's; *headers* are 66 bytes of each packet."
)


def announce(options: argparse.Namespace) -> str:
    """What a run will do, and for how long at most; its first line."""
    ranks = " and ".join(map(str, options.ranks))
    rates = ", ".join(map(describe_rate, options.rates))
    links = "over 127.0.0.1" if options.loopback else f"over links of {rates}"
    cells = len(options.ranks) * len(options.rates) * len(options.modes)
    minutes = math.ceil(cells * (options.seconds + WARM_UP_SECONDS) / 60)
    modes = ", ".join(options.modes)
    return (
        f"Trains DLRM on generated rows, {ranks} ranks on this machine, {links}, by {modes}: "
        f"{minutes} min at most. --help has other choices; results will be in {options.out}."
    )


def accepts(run: dict) -> bool:
    return {"cells", "links"} <= run.keys()


def render(runs: Sequence[dict]) -> str:
    """Of every rank count the times, and the bytes at one rate."""
    found = []
    for run in runs:
        for ranks in dict.fromkeys(cell["ranks"] for cell in run["cells"]):
            rates = list(dict.fromkeys(c["rate"] for c in run["cells"] if c["ranks"] == ranks))
            at = BYTES_AT if BYTES_AT in rates else rates[0]
            local_size = run["options"].get("local_size", 1)
            title = f"**{ranks} ranks{f', {local_size} a node' if local_size > 1 else ''}**"
            found += [f"{title}, ms per step", _times(run, ranks, rates)]
            found += [f"{title}, bytes at {describe_rate(at)}", _bytes(run, ranks, at)]
    return "\n\n".join(found)


def label(run: dict, mode: str) -> str:
    """The mode's title, with the density that the run had."""
    title = METHODS[mode].title
    sparse = mode.startswith(("dct", "topk")) and mode != "dct-int4"
    return f"{title}, {100 * run['options']['density']:g} %" if sparse else title


def _times(run: dict, ranks: int, rates: Sequence[float | None]) -> str:
    plain = {
        link["rate"]: f"{_rate(link['bits_per_second'])}, {link['latency_us']:.0f} us"
        for link in run["links"]
        if link["ranks"] == ranks
    }
    rows = {mode: [label(run, mode)] for mode in _modes(run, ranks)}
    for rate in rates:
        for cell in _cells(run, ranks, rate):
            rows[cell["mode"]].append(_median(cell))
    transfer = ["a plain transfer; one byte", *(plain.get(rate, "") for rate in rates)]
    return table(["", *map(describe_rate, rates)], [transfer, *rows.values()])


def _median(cell: dict) -> str:
    if cell["step_ms"] is None:
        return "failed"
    low, median, high = cell["step_ms"]
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


def _bytes(run: dict, ranks: int, rate: float | None) -> str:
    headings = ["", "formula", "fewer by", "counter", "of formula + headers", "packets"]
    headings += ["inside the node", *PURPOSES.values(), "ms: compute, pack, wire, unpack"]
    cells = [cell for cell in _cells(run, ranks, rate) if cell["step_ms"]]
    dense = next((cell for cell in cells if cell["mode"].endswith("dense")), None)
    rows = []
    for cell in cells:
        formula, counter, packets = (cell[k] for k in ("payload_bytes", "wire_bytes", "packets"))
        row = [label(run, cell["mode"]), number(formula)]
        row.append(times(dense["payload_bytes"] / formula) if dense else "")
        counted = counter / (formula + HEADER_BYTES * packets)
        row += [number(counter), f"{counted:.3f}", number(packets)]
        row.append(number(cell.get("node_bytes") or None))
        row += [number(cell.get("purpose_bytes", {}).get(purpose)) for purpose in PURPOSES]
        rows.append([*row, ", ".join(f"{ms:.1f}" for ms in cell["phases_ms"].values())])
    return table(headings, rows)


def _modes(run: dict, ranks: int) -> list[str]:
    return list(dict.fromkeys(cell["mode"] for cell in run["cells"] if cell["ranks"] == ranks))


def _cells(run: dict, ranks: int, rate: float | None) -> list[dict]:
    return [cell for cell in run["cells"] if (cell["ranks"], cell["rate"]) == (ranks, rate)]


def crossings(cells: list[Cell]) -> list[dict]:
    """Where DCT's step time crosses that of another mode of the same model, for every rank count.

    Each: {"ranks", "against", "pays_up_to"}: bits per second, interpolated between the two measured
    rates on a logarithmic scale; the lower one where the upper is unlimited, as there is nothing to
    interpolate towards; None if DCT is faster at every rate, 0 if at none. "between" are the two
    rates, and "regains" is there if DCT is faster again at a higher rate: noise, then.
    """
    found = []
    for ranks in sorted({cell.ranks for cell in cells}):
        for against in dict.fromkeys(c.mode for c in cells if c.mode != METHODS[c.mode].dct):
            # {rate: how many times faster DCT is}; unlimited last.
            faster = _faster(cells, ranks, against)
            if not faster:
                continue
            found.append({"ranks": ranks, "against": against} | _crossing(faster))
    return found


def describe_crossings(found: list[dict]) -> Iterator[str]:
    for crossing in found:
        at = crossing["pays_up_to"]
        if at is None:
            text = f"faster at every rate measured, up to {describe_rate(crossing['between'][0])}"
        elif at == 0:
            text = f"slower at every rate measured, from {describe_rate(crossing['between'][1])}"
        else:
            low, high = (describe_rate(rate) for rate in crossing["between"])
            if crossing["between"][1] is None:
                text = f"pays at {low}, no longer on an unlimited link: somewhere between it stops"
            else:
                text = f"pays up to a rate between {low} and {high}, at about {_rate(at)}"
            if crossing["regains"]:
                text += " (and again above: within the noise)"
        against = METHODS[crossing["against"]]
        pair = f"{METHODS[against.dct].title} against {against.title}"
        yield f"{crossing['ranks']} ranks, {pair}: {text}"


def _faster(cells: list[Cell], ranks: int, against: str) -> list[tuple[float | None, float]]:
    def median(rate: float | None, mode: str) -> float | None:
        of = (c for c in cells if (c.ranks, c.rate, c.mode) == (ranks, rate, mode) and c.step_ms)
        return next((c.step_ms[1] for c in of), None)

    rates = {cell.rate for cell in cells if cell.ranks == ranks}
    ordered = sorted(rates, key=lambda rate: math.inf if rate is None else rate)
    pairs = [(rate, median(rate, against), median(rate, METHODS[against].dct)) for rate in ordered]
    return [(rate, theirs / ours) for rate, theirs, ours in pairs if theirs and ours]


def _crossing(faster: list[tuple[float | None, float]]) -> dict:
    if faster[0][1] < 1:
        regains = any(ratio >= 1 for _, ratio in faster)
        return {"pays_up_to": 0, "between": [0, faster[0][0]], "regains": regains}
    for place, ((low, before), (high, after)) in enumerate(pairwise(faster)):
        if after < 1:
            regains = any(ratio >= 1 for _, ratio in faster[place + 2 :])
            at = low
            if high is not None:
                share = math.log(before) / math.log(before / after)
                at = low * (high / low) ** share
            return {"pays_up_to": at, "between": [low, high], "regains": regains}
    return {"pays_up_to": None, "between": [faster[-1][0], None], "regains": False}


def _rate(bits_per_second: float) -> str:
    if bits_per_second >= 1e9:
        return f"{bits_per_second / 1e9:.2f} Gbit/s"
    return f"{bits_per_second / 1e6:.0f} Mbit/s"
