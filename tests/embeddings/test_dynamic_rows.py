"""Rows created in training equal rows created before training. Also: checkpoints and errors."""

import copy
import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dct_embeddings import (
    DynamicFeatureRows,
    EquivalentSubstitution,
    FactorizationMachine,
    FeatureRows,
    LinearTerms,
    RowWiseAdagrad,
    SumPooledEmbedding,
    merge_feature_rows,
)
from support.ranks import on_ranks, run_ranks

WIDTH, FIELDS, BATCH, STEPS, LR = 4, 2, 4, 40, 0.5
F64 = torch.float64


def _rows(**settings):
    return DynamicFeatureRows(1 + WIDTH, 500, 0.3, seed=3, dtype=F64, **settings)


def _layer(rows):
    operators = [
        LinearTerms(),
        FactorizationMachine(WIDTH, first=1),
        SumPooledEmbedding(WIDTH, first=1),
    ]
    return EquivalentSubstitution(rows, operators)


def _ids(step, sample):
    """Ids of each field. From step 20 on there are new ids."""
    generator = torch.Generator().manual_seed(100 * step + sample)
    num_ids = 30 if step < 20 else 60
    numbers = torch.randint(num_ids, (FIELDS, 2), generator=generator)
    return numbers * (2**62 // 60)  # ids are far apart


def _bags(step, samples):
    ids = torch.stack([_ids(step, sample) for sample in samples], dim=1)
    return ids.flatten(), torch.full((FIELDS, len(samples)), 2)


def _loss(linear, pairs, pooled):
    return (linear + pairs + pooled.flatten(1).sin().sum(1) - 1).square().mean()


def _reference_run():
    """The oracle: one process with a table of all future ids and the same initial rows."""
    all_ids = torch.arange(60) * (2**62 // 60)
    weight = nn.Parameter(_initial(all_ids))
    optimizer, losses = torch.optim.SGD([weight], LR / 10), []
    for step in range(STEPS):
        ids = torch.stack([_ids(step, sample) for sample in range(BATCH)])
        rows = weight[torch.searchsorted(all_ids, ids.flatten(1))]
        products = rows[..., 1:] @ rows[..., 1:].transpose(1, 2)
        pairs = products.triu(1).sum((1, 2))
        pooled = rows[..., 1:].view(BATCH, FIELDS, 2, WIDTH).sum(2)
        optimizer.zero_grad()
        loss = _loss(rows[..., 0].sum(1), pairs, pooled)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), dict(zip(all_ids.tolist(), weight.detach(), strict=True))


def _initial(ids):
    """Initial rows by the definition, per id and column, with Python integers."""

    def mixed(x):
        x = _signed(x * -0x61C8864680B583EB)
        x = _signed((x ^ x >> 32) * -0x4B47D0C5A2D2F58B)
        return x ^ x >> 31

    def number(id_, column):
        drawn = mixed(mixed(id_) ^ mixed(column + (3 << 32))) >> 39
        return (drawn / 2**23 - 1) * 0.3

    rows = [[number(id_, column) for column in range(1, 2 + WIDTH)] for id_ in ids.tolist()]
    return torch.tensor(rows, dtype=F64)


def _signed(x):
    return (x + 2**63) % 2**64 - 2**63


def _train_and_compare(rank, losses, weight):
    ranks = dist.get_world_size()
    rows = _rows()
    layer, optimizer = _layer(rows), torch.optim.SGD([rows.weight], LR / 10)
    samples = range(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(*layer(*_bags(step, samples)))
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert (total / ranks - losses[step]).abs() < 1e-12, step
        seen.append(len(rows))
    assert 0 < seen[19] < seen[-1]  # new rows were created
    assert rows.ids().unique().numel() == len(rows)
    for id_, row in zip(rows.ids().tolist(), rows.weight[1:], strict=False):
        assert (row - weight[id_]).abs().max() < 1e-12
    counts = torch.tensor(len(rows))
    dist.all_reduce(counts)
    assert counts == len(weight)
    assert not rows.weight[0].any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_with_new_ids_equals_training_with_all_ids(ranks):
    run_ranks(_train_and_compare, ranks, *_reference_run())


def _trained(rank):
    """This rank's state after some steps with an optimizer that stores one number per row."""
    rows = _rows()
    layer, optimizer = _layer(rows), RowWiseAdagrad([rows.weight], LR)
    rows.attach("sum", optimizer, "sum")
    for step in range(10):
        optimizer.zero_grad()
        _loss(*layer(*_bags(step, [rank]))).backward()
        optimizer.step()
    state = rows.state_dict()
    assert state["weight"].shape == (len(rows), 1 + WIDTH)
    assert state["weight"].untyped_storage().nbytes() == state["weight"].nbytes

    return state


def _check_merged(rank, states, merged):
    """Check that four ranks hold exactly the rows and attached state of the two saved ranks."""
    rows = _rows()
    optimizer = RowWiseAdagrad([rows.weight], LR)
    sums = optimizer.state[rows.weight]["sum"]
    rows.attach("sum", optimizer, "sum")
    rows.load_state_dict(merged)
    parts = [None] * 4
    used = slice(1, 1 + len(rows))
    part = rows.ids().clone(), rows.weight.detach()[used].clone(), sums[used].clone()
    dist.all_gather_object(parts, part)
    assert all(len(ids) > 0 for ids, *_ in parts)
    found, expected = {}, {}
    for ids, weight, sums in parts:
        for index, id_ in enumerate(ids.tolist()):
            assert id_ not in found
            found[id_] = weight[index], sums[index]
    for state in states:
        for index, id_ in enumerate(state["ids"].tolist()):
            expected[id_] = state["weight"][index], state["per_row.sum"][index]
    assert found.keys() == expected.keys()
    for id_, (row, number) in expected.items():
        assert torch.equal(found[id_][0], row) and torch.equal(found[id_][1], number)
    before = len(rows)
    _layer(rows)(*_bags(0, [rank % 2]))  # no rows are created for known ids
    assert len(rows) == before


def test_checkpoints_of_two_ranks_merge_and_load_on_four():
    states = run_ranks(_trained, 2)
    merged = merge_feature_rows(states[::-1])
    run_ranks(_check_merged, 4, states, merged)


@on_ranks(1)
def test_attached_state_is_the_state_of_the_optimizer(rank):
    """The states of the rows and of the optimizer load in either order."""
    seen = {7: 0.0, 2**62: 0.0, 5: 0.0}  # {id: expected accumulator}

    def made():
        rows = DynamicFeatureRows(1, 10)
        optimizer = RowWiseAdagrad([rows.weight], LR)
        rows.attach("sum", optimizer, "sum")
        return rows, EquivalentSubstitution(rows, [LinearTerms()]), optimizer

    def step(layer, optimizer, factor, *ids):
        optimizer.zero_grad()
        (result,) = layer(torch.tensor(ids), torch.tensor([[len(ids)]]))
        (factor * result.sum()).backward()
        optimizer.step()
        for id_ in set(ids):
            seen[id_] += (factor * ids.count(id_)) ** 2

    def saved(rows):
        state = rows.state_dict()
        return dict(zip(state["ids"].tolist(), state["per_row.sum"].tolist(), strict=True))

    rows, layer, optimizer = made()
    step(layer, optimizer, 1.0, 7, 2**62, 7)
    assert saved(rows) == {7: seen[7], 2**62: seen[2**62]}
    for rows_first in (True, False, True):
        states = copy.deepcopy((rows.state_dict(), optimizer.state_dict()))
        rows, layer, optimizer = made()
        loads = [(rows, states[0]), (optimizer, states[1])]
        for part, state in loads if rows_first else loads[::-1]:
            part.load_state_dict(state)
        step(layer, optimizer, 3.0, 5, 7)
        assert saved(rows) == seen
    old = {
        "owner": torch.tensor([0, 1]),
        "ids": torch.tensor([5, 2**62]),
        "weight": torch.tensor([[0.5], [-2.0]]),
        "per_row.sum": torch.tensor([4.0, 9.0]),
    }
    rows.load_state_dict(old)
    assert optimizer.state[rows.weight]["sum"].tolist() == [0.0, 4.0, 9.0, *[0.0] * 8]
    assert all(torch.equal(part, old[name]) for name, part in rows.state_dict().items())

    for broken in ({}, {"sum": torch.zeros(3)}):
        optimizer.state[rows.weight] = broken
        rule = "optimizer must have a tensor 'sum' of 11 rows for weight, got "
        got = "one of (3,)" if broken else "none"
        with pytest.raises(ValueError, match=re.escape(rule + got)):
            rows.state_dict()
        with pytest.raises(ValueError, match=re.escape(rule + got)):
            rows.load_state_dict(old | {"ids": torch.tensor([1, 2])})
        assert rows.ids().tolist() == [5, 2**62]


def _refused(text, call):
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        call()


@on_ranks(1)
def test_merging_wrong_states_raises(rank):
    common = {"ids": torch.arange(3), "weight": torch.ones(3, 1), "per_row.sum": torch.ones(3)}
    ranks = [{"owner": torch.tensor([rank, 2])} | common for rank in range(2)]
    wide = torch.zeros(4)  # the state has 3 ids
    saved, other = DynamicFeatureRows(1, 3).state_dict(), FeatureRows(torch.zeros(3, 1))
    state = "[0] must be a DynamicFeatureRows.state_dict(), with no prefix to its names, got one"
    for text, states in (
        (" must hold one state of every rank, got 0 of 1, 0 of 1", [saved] * 2),
        (" must hold one state of every rank, got none", []),
        (f"{state} without owner, ids, weight", [{}]),
        (f"{state} without ids", [other.state_dict()]),
        ("[0]['owner'] must be [rank, ranks]", [saved | {"owner": torch.ones(3)}]),
        ("[0]['weight'] must be a plain dense", [saved | {"weight": saved["weight"].to("meta")}]),
        ("[1]['per_row.sum'] must be torch.float32", [ranks[0], ranks[1] | {"per_row.sum": wide}]),
    ):
        text = f"dct::merge_feature_rows: states{text}"
        _refused(text, lambda given=states: merge_feature_rows(given))


@on_ranks(2)
def test_rows_of_another_rank_raise_unless_the_state_is_merged(rank):
    rows, ids = DynamicFeatureRows(1, 50), torch.arange(40)
    owned = ids[rows.owners(ids)[0] == rank]
    state = {"owner": torch.tensor([rank, 2]), "ids": owned, "weight": torch.ones(len(owned), 1)}
    rows.load_state_dict(state)
    assert rows.ids().tolist() == owned.tolist()
    text = f"state must be that of rank {rank} of 2, or one from merge_feature_rows, got that of "
    _refused(text, lambda: rows.load_state_dict(state | {"owner": torch.tensor([1 - rank, 2])}))
    foreign = ids[rows.owners(ids)[0] != rank][:1]
    more = {"ids": torch.cat([owned, foreign]), "weight": torch.zeros(len(owned) + 1, 1)}
    text = f"state['ids'] must be of rank {rank}'s rows, as the owner of the state, got "
    _refused(
        f"{text}{foreign.item()} of rank {1 - rank}", lambda: rows.load_state_dict(state | more)
    )
    assert all(torch.equal(part, state[name]) for name, part in rows.state_dict().items())
    rows.load_state_dict(state | more | {"owner": torch.tensor([-1, 2])})
    assert rows.ids().tolist() == owned.tolist() and not rows.state_dict()["weight"].any()


@on_ranks(1)
def test_wrong_ids_and_states_raise_and_change_nothing(rank):
    _refused("bound must be in [0, 3.4e+38], got nan", lambda: DynamicFeatureRows(1, 3, math.nan))
    rows = DynamicFeatureRows(1, 3)
    numbers = torch.tensor([0, 5, 2**31 - 1])
    assert torch.equal(rows.initial(numbers.int()), rows.initial(numbers))
    layer = EquivalentSubstitution(rows, [LinearTerms()])
    lengths = torch.tensor([[2, 1]])

    layer.eval()
    (result,) = layer(torch.tensor([5, 2**63 - 1, 7]), lengths)
    assert not result.any() and len(rows) == 0
    result.sum().backward()
    assert not rows.weight.grad.to_dense()[0].any()  # row 0 has no gradient
    layer.train()
    layer(torch.tensor([5, 2**63 - 1, 5]), lengths)
    before = rows.weight[:3].clone()
    for text, ids in (
        ("ids[1] must be in [0, 9223372036854775807], got -1", [5, -1, 7]),
        ("capacity must be at least the number of features seen, got 3 for 4 on rank 0", [5, 6, 7]),
    ):
        _refused(text, lambda ids=ids: layer(torch.tensor(ids), lengths))
    assert rows.ids().tolist() == [5, 2**63 - 1] and torch.equal(rows.weight[:3], before)
    layer(torch.tensor([5, 6, 5]), lengths)  # fits into the capacity

    optimizer, state = RowWiseAdagrad([rows.weight]), rows.state_dict()
    rows.attach("sum", optimizer, "sum")
    optimizer.state[rows.weight]["sum"][1:4] = torch.tensor([1.0, 2.0, 3.0])
    text = "state must have owner, ids, weight, per_row.sum, got no per_row.sum"
    _refused(text, lambda: rows.load_state_dict(state, strict=False))
    loaded = rows.load_state_dict({}, strict=False)
    assert loaded.missing_keys == ["owner", "ids", "weight", "per_row.sum"]
    before = state = rows.state_dict()
    for name, value, text in (
        ("ids", torch.tensor([1, 2, 1]), "state['ids'] must be distinct, got some ids twice"),
        ("ids", torch.tensor([1, 2, -1]), "ids[2] must be in [0, 9223372036854775807], got -1"),
    ):
        _refused(text, lambda s=state | {name: value}: rows.load_state_dict(s))
    assert all(torch.equal(part, before[name]) for name, part in rows.state_dict().items())
    small, text = DynamicFeatureRows(1, 2), "capacity must be at least 3, the rows of the state, "
    small.attach("sum", RowWiseAdagrad([small.weight]), "sum")
    _refused(text, lambda: small.load_state_dict(state))
