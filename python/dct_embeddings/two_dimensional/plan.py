"""Plans, which assign the rows of embedding tables to the ranks of a sharding group."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

from dct_kernels import checks

MOST_ROWS = 2**31 - 1  # per table and per rank, because ids are sent in 32 bits

_Item = TypeVar("_Item")


class Shard(NamedTuple):
    """The rows first to end - 1 of a table: all rows (table-wise) or a part (row-wise).

    Attributes:
        table: the index of the table in the list of tables.
        first: the first row of the shard.
        end: the row after the last row of the shard.
    """

    table: int
    first: int
    end: int


def plan_shards(
    rows: Sequence[int], ranks: int, row_wise: Collection[int] = ()
) -> list[list[Shard]]:
    """Assign tables to ranks: tables in `row_wise` are split evenly, and other tables stay whole.

    To balance traffic, the numbers of whole tables per rank differ by at most one. Whole tables are
    assigned from the largest to the smallest. Each goes to the rank that has the fewest rows among
    the ranks that may take one more table. Ties go to the lower table and rank, so the result is
    deterministic. No process group is needed.

    Args:
        rows: the number of rows of each table, at least 1.
        ranks: number of ranks in a sharding group. Every replica uses the same plan.
        row_wise: the tables to split. They must have at least as many rows as there are ranks.

    Returns:
        The shards of each rank, in the order of tables, for `ShardedEmbeddingBags`.

    Raises:
        ValueError, TypeError: an argument is out of range, or a rank would own no rows.
    """
    op = "plan_shards"
    checks.require_int(op, "ranks", ranks, 1, MOST_ROWS)
    rows = require_list(op, "rows", rows, "integers, one for each table")
    for table, count in enumerate(rows):
        checks.require_int(op, f"rows[{table}]", count, 1, MOST_ROWS)
    row_wise = require_list(op, "row_wise", row_wise, "numbers of tables")
    if len(rows) < (1 if row_wise else ranks):
        rule = f"at least {ranks} tables, one for each rank, or some in row_wise"
        checks.fail(op, "rows", rule, len(rows), verb="have")
    for index, table in enumerate(row_wise):
        checks.require_int(op, f"row_wise[{index}]", table, 0, len(rows) - 1)
    plan: list[list[Shard]] = [[] for _ in range(ranks)]
    for table in sorted(set(row_wise)):
        if rows[table] < ranks:
            checks.fail(op, f"rows[{table}]", f"at least {ranks}, one for each rank", rows[table])
        cuts = [rows[table] * rank // ranks for rank in range(ranks + 1)]
        for rank, shards in enumerate(plan):
            shards.append(Shard(table, cuts[rank], cuts[rank + 1]))
    load, tables = [row_count(shards) for shards in plan], [0] * ranks
    whole = set(range(len(rows))) - set(row_wise)
    fewest, with_one_more = divmod(len(whole), ranks)
    for table in sorted(whole, key=lambda table: (-rows[table], table)):
        most = fewest + (sum(count > fewest for count in tables) < with_one_more)
        rank = min((r for r in range(ranks) if tables[r] < most), key=load.__getitem__)
        plan[rank].append(Shard(table, 0, rows[table]))
        load[rank] += rows[table]
        tables[rank] += 1
    return [sorted(shards) for shards in plan]


def row_count(shards: Sequence[Shard]) -> int:
    """The number of rows of these shards."""
    return sum(shard.end - shard.first for shard in shards)


def require_list(op: str, arg: str, values: Iterable[_Item], rule: str) -> list[_Item]:
    """Return `values` as a list. Raise unless they are iterable."""
    try:
        return list(values)
    except TypeError:
        checks.fail(op, arg, rule, checks.shown(values), TypeError)


def require_plan(
    op: str, plan: Sequence[Sequence[Shard]], rows: Sequence[int], ranks: int
) -> list[list[Shard]]:
    """Return `plan` as lists. Raise unless each rank owns rows and each row has one owner.

    A shard may be any sequence of three integers.
    """
    lists = require_list(op, "plan", plan, "lists of shards, one for each rank")
    checked = [_require_shards(op, f"plan[{r}]", shards, rows) for r, shards in enumerate(lists)]
    if len(checked) != ranks:
        rule = f"{ranks} elements, one for each rank of the sharding group"
        checks.fail(op, "plan", rule, len(checked), verb="have")
    owned = sorted((shard, rank) for rank, shards in enumerate(checked) for shard in shards)
    for table, count in enumerate(rows):
        covered, owner = 0, ranks
        parts = [(shard, rank) for shard, rank in owned if shard.table == table]
        for shard, rank in [*parts, (Shard(table, count, count), ranks)]:
            if shard.first != covered:
                got = f"rows {covered} to {shard.first - 1} on no rank"
                if shard.first < covered:
                    last = min(covered, shard.end) - 1
                    got = f"rows {shard.first} to {last} on rank {owner} and again on rank {rank}"
                rule = f"hold every row of table {table} once"
                raise ValueError(f"dct::{op}: plan must {rule}, got {got}")
            covered, owner = shard.end, rank
    return checked


def _require_shards(op: str, arg: str, shards: Sequence[Shard], rows: Sequence[int]) -> list[Shard]:
    found = []
    for index, shard in enumerate(require_list(op, arg, shards, "shards")):
        name, rule = f"{arg}[{index}]", "a shard: table, first and end"
        parts = require_list(op, name, shard, rule)
        if len(parts) != 3:
            checks.fail(op, name, rule, shard)
        table, first, end = parts
        checks.require_int(op, f"{name}.table", table, 0, len(rows) - 1)
        checks.require_int(op, f"{name}.first", first, 0, rows[table] - 1)
        checks.require_int(op, f"{name}.end", end, first + 1, rows[table])
        found.append(Shard(table, first, end))
    if not found:
        checks.fail(op, arg, "at least one shard", "none", verb="have")
    if row_count(found) > MOST_ROWS:
        checks.fail(op, arg, f"at most {MOST_ROWS} rows", row_count(found), verb="have")
    return found
