"""Tables of `dct-bench link`: times over rates, and bytes beside the interface's counter."""

from collections.abc import Sequence

from .markdown import number, table, times

HEADERS = 66  # bytes of a packet: Ethernet, IPv4, TCP with timestamps
BYTES_AT = 1e9  # the rate that bytes are shown at, where it was measured
PURPOSES = {
    "counts": "counts",
    "ids": "ids",
    "mp_forward": "rows forward",
    "mp_backward": "rows backward",
    "dp": "MLPs' gradients",
}
NAMES = {
    "dense": "float32 all-reduce",
    "bf16": "bfloat16 hook",
    "powersgd1": "PowerSGD, rank 1",
    "powersgd2": "PowerSGD, rank 2",
    "topk": "exact top-k",
    "dct": "DCT, all-gather",
    "dct-e3m0": "DCT, e3m0",
    "dct-int4": "every entry in int4",
    "local": "local steps, 10 %, every 10 steps",
    "local-ternary": "local steps, ternary, every 10 steps",
    "dct-shard": "DCT, reduce-scatter",
    "dct-reduce-scatter": "DCT, reduce-scatter",
    "dct-auto": "DCT, chosen by formula",
    "dct-mesh": "DCT, all-gather, mesh",
    "dct-mesh-shard": "DCT, reduce-scatter, mesh",
    "dct-mesh-reduce-scatter": "DCT, reduce-scatter, mesh",
    "hybrid-dense": "float32",
    "hybrid-dense-dedup": "float32, distinct rows",
    "hybrid-dp": "DCT-DP",
    "hybrid-dct": "DCT-DP and DCT-MP",
    "hybrid-format": "DCT-DP, rows in few bits",
    "hybrid-format-dedup": "DCT-DP, rows in few bits, distinct rows",
}
NOTE = (
    "A time is the median of a step, as long as its slowest rank, with 20 to 80 %. Bytes are per "
    "rank and step: *formula* is what it hands to collectives, *counter* is its interface's."
)


def accepts(run: dict) -> bool:
    return {"cells", "links"} <= run.keys()


def rate_name(rate: float | None) -> str:
    if rate is None:
        return "unlimited"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def label(run: dict, mode: str) -> str:
    """The mode's name, with the density that the run had."""
    sparse = mode.startswith(("dct", "topk")) and mode != "dct-int4"
    return f"{NAMES[mode]}, {100 * run['options']['density']:g} %" if sparse else NAMES[mode]


def milliseconds(cell: dict) -> str:
    low, median, high = cell["step_ms"]
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


def cell_of(run: dict, ranks: int, rate: float | None, mode: str) -> dict | None:
    for cell in run["cells"]:
        if (cell["ranks"], cell["rate"], cell["mode"]) == (ranks, rate, mode) and cell["step_ms"]:
            return cell
    return None


def render(runs: Sequence[dict]) -> str:
    return "\n\n".join(text for run in runs for text in _tables(run))


def _tables(run: dict) -> list[str]:
    found = []
    for ranks in dict.fromkeys(cell["ranks"] for cell in run["cells"]):
        rates = list(dict.fromkeys(c["rate"] for c in run["cells"] if c["ranks"] == ranks))
        at = BYTES_AT if BYTES_AT in rates else rates[0]
        found += [f"**{ranks} ranks**, ms per step", _times(run, ranks, rates)]
        found += [f"**{ranks} ranks**, bytes at {rate_name(at)}", _bytes(run, ranks, at)]
    return found


def _modes(run: dict, ranks: int) -> list[str]:
    return list(dict.fromkeys(cell["mode"] for cell in run["cells"] if cell["ranks"] == ranks))


def _times(run: dict, ranks: int, rates: Sequence[float | None]) -> str:
    plain = {
        link["rate"]: f"{link['bits_per_second'] / 1e6:,.0f} Mbit/s"
        for link in run["links"]
        if link["ranks"] == ranks
    }
    rows = [["plain transfer", *(plain.get(rate, "") for rate in rates)]]
    for mode in _modes(run, ranks):
        cells = [cell_of(run, ranks, rate, mode) for rate in rates]
        rows.append(
            [label(run, mode), *("failed" if c is None else milliseconds(c) for c in cells)]
        )
    return table(["", *map(rate_name, rates)], rows)


def _bytes(run: dict, ranks: int, rate: float | None) -> str:
    headings = ["", "formula", "fewer by", "counter", "of formula + headers", "packets"]
    headings += ["inside the node", *PURPOSES.values(), "ms: compute, pack, wire, unpack"]
    cells = [cell_of(run, ranks, rate, mode) for mode in _modes(run, ranks)]
    dense = next((cell for cell in cells if cell and cell["mode"].endswith("dense")), None)
    rows = []
    for cell in filter(None, cells):
        formula, counter, packets = (cell[k] for k in ("payload_bytes", "wire_bytes", "packets"))
        row = [label(run, cell["mode"]), number(formula)]
        row.append(times(dense["payload_bytes"] / formula) if dense else "")
        row += [number(counter), f"{counter / (formula + HEADERS * packets):.3f}", number(packets)]
        row.append(number(cell.get("node_bytes") or None))
        row += [number(cell.get("purpose_bytes", {}).get(purpose)) for purpose in PURPOSES]
        rows.append([*row, ", ".join(f"{ms:.1f}" for ms in cell["phases_ms"].values())])
    return table(headings, rows)
