"""Which rank owns which embedding tables."""

from collections.abc import Sequence

from ..errors import UsageError


def shard_tables(rows: Sequence[int], ranks: int) -> list[list[int]]:
    """Tables of every rank: whole ones, balanced in size, as equal in number as can be.

    Largest first, each to the rank with the fewest rows so far that has room for a table: at most
    ceil(tables / ranks), at least floor(tables / ranks). Equal numbers: equal traffic.
    Deterministic; ties go to the lower table and rank.

    Args:
        rows: of each table.

    Returns:
        For every rank its tables, ascending.

    Raises:
        UsageError: there are more ranks than tables.
    """
    if ranks > len(rows):
        raise UsageError(f"--ranks must be at most {len(rows)}, one table each, got {ranks}")
    plan: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    fewest, with_one_more = divmod(len(rows), ranks)
    for table in sorted(range(len(rows)), key=lambda t: -rows[t]):
        with_more = sum(len(tables) > fewest for tables in plan)
        most = fewest + (with_more < with_one_more)
        rank = min((r for r in range(ranks) if len(plan[r]) < most), key=load.__getitem__)
        plan[rank].append(table)
        load[rank] += rows[table]
    return [sorted(tables) for tables in plan]


def describe(plan: Sequence[Sequence[int]], rows: Sequence[int]) -> str:
    """A line for every rank: how many tables and rows, and which tables."""
    return "\n".join(
        f"rank {rank}: {len(tables)} tables, {sum(rows[t] for t in tables):,} rows: "
        + " ".join(map(str, tables))
        for rank, tables in enumerate(plan)
    )
