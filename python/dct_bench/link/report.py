"""Tables of `dct-bench link`, and where DCT stops paying."""

import math
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..rates import describe_rate
from .cells import HEADER_BYTES, Cell
from .methods import METHODS
from .phases import PHASES


def print_tables(console: Console, links: list[dict], cells: list[Cell]) -> None:
    """Times, one table per rate, and bytes, one table, of one rank count."""
    for link in links:
        _print_times(console, link, [cell for cell in cells if cell.rate == link["rate"]])
    _print_bytes(console, [cell for cell in cells if cell.step_ms is not None])
    _print_purposes(console, [cell for cell in cells if cell.purpose_bytes])
    for cell in cells:
        if cell.failed:
            text = f"{METHODS[cell.mode].title} at {describe_rate(cell.rate)} failed: {cell.failed}"
            console.print(text, style="red", markup=False, highlight=False)


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


def print_crossings(console: Console, found: list[dict]) -> None:
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
        line = f"{crossing['ranks']} ranks, {pair}: {text}"
        console.print(line, markup=False, highlight=False)


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
    for number, ((low, before), (high, after)) in enumerate(pairwise(faster)):
        if after < 1:
            regains = any(ratio >= 1 for _, ratio in faster[number + 2 :])
            at = low
            if high is not None:
                share = math.log(before) / math.log(before / after)
                at = low * (high / low) ** share
            return {"pays_up_to": at, "between": [low, high], "regains": regains}
    return {"pays_up_to": None, "between": [faster[-1][0], None], "regains": False}


def _print_times(console: Console, link: dict, cells: list[Cell]) -> None:
    nominal = f" of {describe_rate(link['rate'])} nominal" if link["rate"] else ""
    title = (
        f"{link['ranks']} ranks{_a_node(link)}, {describe_rate(link['rate'])}: a plain 64 MiB "
        f"transfer ran at {_rate(link['bits_per_second'])}{nominal}; one byte takes "
        f"{link['latency_us']:.0f} us"
    )
    table = _table(title, "ms/step", "20-80 %", "vs dense", *PHASES)
    medians = {cell.mode: cell.step_ms[1] for cell in cells if cell.step_ms}
    for cell in cells:
        dense = medians.get(METHODS[cell.mode].dense)
        if cell.step_ms is None:
            table.add_row(METHODS[cell.mode].title, "failed")
            continue
        low, median, high = cell.step_ms
        table.add_row(
            METHODS[cell.mode].title,
            f"{median:.1f}",
            f"{low:.1f}-{high:.1f}",
            f"{100 * (median / dense - 1):+.0f} %" if dense else "-",
            *(f"{ms:.1f}" for ms in cell.phases_ms.values()),
        )
    console.print(table)


def _print_bytes(console: Console, cells: list[Cell]) -> None:
    title = "Bytes a rank sends per step"
    table = _table(title, "rate", "formula", "counter", "packets", "ratio")
    for cell in cells:
        table.add_row(
            METHODS[cell.mode].title,
            describe_rate(cell.rate),
            f"{cell.payload_bytes:,.0f}",
            f"{cell.wire_bytes:,.0f}",
            f"{cell.packets:,.0f}",
            f"{cell.counted_over_formula:.3f}",
        )
    console.print(table)
    if cells:
        largest = max(abs(cell.counted_over_formula - 1) for cell in cells)
        text = (
            "formula: what it hands to collectives, and leaves its node if that has several ranks; "
            "counter: what left its interface, shared among the node's ranks; ratio: "
            f"counter / (formula + {HEADER_BYTES} bytes of headers for every packet), off by "
            f"{100 * largest:.1f} % at most\n"
        )
        console.print(text, markup=False, highlight=False)


def _print_purposes(console: Console, cells: list[Cell]) -> None:
    """What the bytes of hybrid modes are for, and how long the collectives that send them take."""
    if not cells:
        return
    bytes_of = _table("What those of hybrid modes are for", "rate", *cells[0].purpose_bytes)
    times = _table("ms of collectives", "rate", *cells[0].purpose_ms)
    for cell in cells:
        name = METHODS[cell.mode].title, describe_rate(cell.rate)
        bytes_of.add_row(*name, *(f"{sent:,.0f}" for sent in cell.purpose_bytes.values()))
        times.add_row(*name, *(f"{ms:.2f}" for ms in cell.purpose_ms.values()))
    console.print(bytes_of)
    console.print(times)
    text = "a step's first collective, of ids, waits for the rank that comes later"
    console.print(f"{text}\n", markup=False, highlight=False)


def _a_node(link: dict) -> str:
    return f", {link['local_size']} a node" if link["local_size"] > 1 else ""


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")
    table.add_column("mode", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _rate(bits_per_second: float) -> str:
    if bits_per_second >= 1e9:
        return f"{bits_per_second / 1e9:.2f} Gbit/s"
    return f"{bits_per_second / 1e6:.0f} Mbit/s"
