"""dct-bench scale --model tables: full model parallelism beside groups with replicas."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from .. import provenance
from ..rates import describe_rate
from .arguments import ASSUMED_COMPUTE_MS
from .cost_model import Link
from .report import new_table
from .tables import SYNCS, Cost, Tables, cost

FULL = "full"  # one group of all ranks
TITLES = {
    FULL: "full MP",
    "whole": "2D, whole tables",
    "float32": "2D, changed rows",
    "float16": "2D, float16",
    "dct": "2D, DCT",
}
PAPER = "the paper (arXiv 2508.03854) reports near-linear speed up to 4,096 GPUs"


def run(console: Console, options: argparse.Namespace) -> int:
    """Print and write what each way costs, by formula; 0."""
    tables = Tables(
        options.table_rows,
        options.embedding_dim,
        options.lookups,
        options.exponent,
        options.batch_size,
        options.sync_every,
        options.sync_density,
    )
    compute = (options.compute_ms or ASSUMED_COMPUTE_MS["tables"]) / 1e3
    given = "as given" if options.compute_ms else "assumed, not measured"
    console.print(
        f"{tables.rows:,.0f} rows of {tables.width}, {tables.lookups} ids a sample, "
        f"{tables.batch} samples a rank; groups of {options.group_ranks} ranks, a sync every "
        f"{tables.sync_every} steps; compute {1e3 * compute:g} ms, {given}; computed, not measured",
        highlight=False,
    )
    costs = {
        (ranks, rate): _costs(tables, ranks, options, Link(options.alpha_us / 1e6, rate / 8))
        for ranks in options.ranks
        for rate in options.rates
    }
    first = {ranks: costs[ranks, options.rates[0]] for ranks in options.ranks}
    _print(console, "MB a rank sends in a step", first, lambda c: _sent(c) / 1e6)
    _print(console, "GB of a rank's memory", first, lambda c: c.memory / 1e9)
    for rate in options.rates:
        title = f"Fraction of the speed without exchanges, {describe_rate(rate)} a rank; {PAPER}"
        of_rate = {ranks: costs[ranks, rate] for ranks in options.ranks}
        _print(console, title, of_rate, lambda c: compute / (compute + c.seconds))
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    result = {"provenance": provenance.describe(), "options": plain, "compute_s": compute}
    result["costs"] = [
        {"ranks": ranks, "rate": rate, "way": way} | found._asdict()
        for (ranks, rate), ways in costs.items()
        for way, found in ways.items()
    ]
    (options.out / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"in {options.out}: scale.json", style="dim")
    return 0


def _costs(tables: Tables, ranks: int, options: argparse.Namespace, link: Link) -> dict[str, Cost]:
    """{way of TITLES: its cost}; groups larger than all ranks are all ranks."""
    group = min(options.group_ranks, ranks)
    ways = {sync: cost(tables, ranks, group, sync, link) for sync in SYNCS}
    return {FULL: cost(tables, ranks, ranks, SYNCS[0], link)} | ways


def _sent(found: Cost) -> float:
    return found.rows + found.ids + found.sync


def _print(console: Console, title: str, costs: dict[int, dict[str, Cost]], number) -> None:
    table = new_table(title, "ranks")
    for way in TITLES.values():
        table.add_column(way, justify="right", no_wrap=True)
    for ranks, ways in costs.items():
        table.add_row(f"{ranks:,}", *(f"{number(ways[way]):,.3g}" for way in TITLES))
    console.print(table)
