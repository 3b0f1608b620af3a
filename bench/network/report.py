"""Merges the measurements of bench.link and prints them as Markdown tables."""

import argparse
import math
from collections.abc import Sequence

import numpy as np

from bench.rates import describe_rate
from bench.tables import number, table, times

from .methods import METHODS, SHARDED

# Bytes of headers per packet: Ethernet 14, IPv4 20, TCP 20, TCP timestamps 12. Acknowledgements
# are packets without a payload.
HEADER_BYTES = 66
WARM_UP_SECONDS = 3  # estimated, per cell of a table
BYTES_AT = 1e9  # the rate for which bytes are shown, if it was measured
NOTE = (
    "A time is the median step time, with the 20 % and 80 % quantiles. A step takes as long as its "
    "slowest rank. Bytes are per rank and step. *formula* is computed from the sizes of messages, "
    "*counter* counts the bytes that left the interface, and *headers* are 66 bytes per packet."
)


def announce(options: argparse.Namespace) -> str:
    """Describe the run, with an upper limit of its duration."""
    ranks = " and ".join(map(str, options.ranks))
    rates = ", ".join(map(describe_rate, options.rates))
    links = "over 127.0.0.1" if options.loopback else f"over links of {rates}"
    cells = len(options.ranks) * len(options.rates) * len(options.modes)
    minutes = math.ceil(cells * (options.seconds + WARM_UP_SECONDS) / 60)
    model = "a sharded transformer" if options.modes[0] in SHARDED else "DLRM on generated rows"
    return (
        f"Trains {model} with {ranks} ranks on this machine, {links}: "
        f"{', '.join(options.modes)}. Takes at most {minutes} minutes. Results: {options.out}."
    )


def merge(ranks: int, rate: float | None, mode: str, rounds: list[list[dict]], shared: int) -> dict:
    """Merge the measurements of all ranks and rounds into one cell, with figures per step.

    "step_ms" has the 20 % quantile, the median and the 80 % quantile; a step takes as long as its
    slowest rank. "payload_bytes" counts the bytes that a rank sends in collectives. "wire_bytes"
    and "packets" count the traffic that leaves a rank's interface.

    Args:
        rate: bits per second, or None for no limit.
        shared: number of ranks that share an interface and its counters.
    """
    times = np.concatenate([np.max([rank["seconds"] for rank in r], axis=0) for r in rounds])
    low, median, high = (float(1e3 * q) for q in np.quantile(times, (0.2, 0.5, 0.8)))

    def per_step(key: str) -> float:
        return float(sum(np.mean([rank[key] for rank in r]) for r in rounds) / len(times))

    return {
        "ranks": ranks,
        "rate": rate,
        "mode": mode,
        "steps": len(times),
        "step_ms": (low, median, high),
        "payload_bytes": per_step("payload_bytes"),
        "wire_bytes": per_step("wire_bytes") / shared,
        "packets": per_step("packets") / shared,
    }


def render(run: dict) -> str:
    """For each number of ranks, render a table of times, and a table of bytes at one rate."""
    found = []
    for ranks in dict.fromkeys(cell["ranks"] for cell in run["cells"]):
        cells = [cell for cell in run["cells"] if cell["ranks"] == ranks]
        rates = list(dict.fromkeys(cell["rate"] for cell in cells))
        at = BYTES_AT if BYTES_AT in rates else rates[0]
        plain = [link for link in run["links"] if link["ranks"] == ranks]
        found += [f"**{ranks} ranks**, ms per step", _times(cells, plain, rates)]
        found += [f"**{ranks} ranks**, bytes at {describe_rate(at)}", _bytes(cells, at)]
    return "\n\n".join(found)


def _times(cells: Sequence[dict], links: Sequence[dict], rates: Sequence[float | None]) -> str:
    plain = {link["rate"]: f"{link['bits_per_second'] / 1e6:,.0f} Mbit/s" for link in links}
    rows = {cell["mode"]: [METHODS[cell["mode"]].title] for cell in cells}
    for cell in cells:
        low, median, high = cell["step_ms"]
        rows[cell["mode"]].append(f"{median:.1f} ({low:.1f}-{high:.1f})")
    transfer = ["TCP transfer", *(plain.get(rate, "") for rate in rates)]
    return table(["", *map(describe_rate, rates)], [transfer, *rows.values()])


def _bytes(cells: Sequence[dict], rate: float | None) -> str:
    cells = [cell for cell in cells if cell["rate"] == rate]
    baselines = ("dense", "fsdp-bfloat16")
    dense = next((cell for cell in cells if cell["mode"].endswith(baselines)), None)
    rows = []
    for cell in cells:
        formula, counter, packets = (cell[k] for k in ("payload_bytes", "wire_bytes", "packets"))
        row = [METHODS[cell["mode"]].title, number(formula)]
        row.append(times(dense["payload_bytes"] / formula) if dense else "")
        counted = counter / (formula + HEADER_BYTES * packets)
        rows.append([*row, number(counter), f"{counted:.3f}", number(packets)])
    headings = ["", "formula", "fewer bytes", "counter", "counter / (formula + headers)", "packets"]
    return table(headings, rows)
