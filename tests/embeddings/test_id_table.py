"""The hash table of ids, compared with a dict; collisions; growth."""

import random

import pytest
import torch

from dct_embeddings.substitution.id_table import SLOTS, IdTable, mix

CPU = torch.device("cpu")


def _colliding(count):
    """Ids that hash to one bucket and one slot in tables of up to 16 buckets."""
    ids = torch.arange(200_000 * count // 8)
    return ids[mix(ids) & 16 * SLOTS - 1 == 5][:count]


@pytest.mark.parametrize("sizes", [[1], [0, 7, 8, 9], [1000, 1, 1000, 3], [5] * 50, [4096, 4096]])
def test_places_match_a_dict(sizes):
    chance = random.Random(len(sizes))
    table, expected = IdTable(sum(sizes) + 1, CPU), {}
    pool = [*chance.sample(range(2**63 - 1), sum(sizes) + 100), 0, 2**63 - 1]
    chance.shuffle(pool)
    for size in sizes:
        new = [pool.pop() for _ in range(size)]
        table.add(torch.tensor(new, dtype=torch.int64))
        expected |= {id_: 1 + len(expected) + index for index, id_ in enumerate(new)}
        known = chance.choices(list(expected), k=50) if expected else []
        queries = known + pool[:50]
        found = table.find(torch.tensor(queries, dtype=torch.int64)).tolist()
        assert found == [expected.get(id_, 0) for id_ in queries]
    assert len(table) == len(expected) and table.ids.tolist() == list(expected)


def test_ids_of_one_bucket():
    """Ids fill the bucket, and later ids go to the sorted list. Other ids are not found."""
    ids = _colliding(40)
    assert len(ids) == 40
    table = IdTable(32, CPU)
    for count in (1, SLOTS - 2, 1, 1, 10, 12):  # up to a full bucket, one more, and many
        table.add(ids[len(table) :][:count])
        held = len(table)
        assert table.find(ids).tolist() == [*range(1, held + 1), *[0] * (40 - held)]


def test_growth_is_incremental():
    """Each batch splits a limited number of buckets, so ids are never all rehashed together."""
    table, ids = IdTable(20_000, CPU), torch.randperm(10**6)[:20_000]
    for batch in ids.split(500):
        before, buckets = table._places.clone(), table._buckets
        table.add(batch)
        assert table._buckets - buckets <= 251
        touched = before[: buckets * SLOTS] != table._places[: buckets * SLOTS]
        assert touched.view(-1, SLOTS).any(1).sum() <= 251 + len(batch)
    assert torch.equal(table.find(ids), torch.arange(1, 20_001).int())
    first = table._first_slots(mix(ids))
    assert (table._places[first] == torch.arange(1, 20_001)).float().mean() > 0.6
    assert len(table._others) < 200
