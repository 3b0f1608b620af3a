"""EquivalentSubstitution raises, and does not hang, for wrong arguments."""

import re

import pytest
import torch
import torch.distributed as dist

from dct_embeddings import (
    DynamicFeatureRows,
    EquivalentSubstitution,
    FeatureRows,
    FirstLayer,
    LinearTerms,
    SubstituteOperator,
    SumPooledEmbedding,
)
from support.ranks import on_ranks

OWNER = "dct::EquivalentSubstitution: "


def _layer(**settings):
    operators = [LinearTerms(), SumPooledEmbedding(2, first=1)]
    return EquivalentSubstitution(FeatureRows(torch.randn(10, 3)), operators, **settings)


def _refused(text, call, error=ValueError):
    with pytest.raises(error, match=re.escape(text)):
        call()


class Odd(SubstituteOperator):
    def __init__(self, function):
        super().__init__(3)
        self.function = function

    def partial(self, rows, bags):
        return self.function(bags.sums(rows))

    def combine(self, total):
        return total


@on_ranks(1)
def test_partial_results_must_have_a_row_per_sample(rank):
    """The layer checks the shape of the partial results of a user's operator."""
    ids, lengths = torch.tensor([3, 9]), torch.tensor([[1, 0], [0, 1]])
    for function, got in ((lambda pooled: pooled, "(2, 2, 3)"), (lambda pooled: None, "()")):
        layer = _of(FeatureRows(torch.randn(10, 3)), [Odd(function)])
        text = f"{OWNER}Odd.partial must return a tensor [2, m], got {got}"
        _refused(text, lambda layer=layer: layer(ids, lengths))


def _of(rows, operators=(), aggregate="reduce_scatter"):
    return EquivalentSubstitution(rows, operators, aggregate)


@on_ranks(1)
def test_wrong_ids_and_lengths_raise(rank):
    layer, ids = _layer(), torch.tensor([3, 9])
    lengths = torch.tensor([[1, 0], [0, 1]])
    for text, *wrong in (
        ("ids[1] must be in [0, 9], got 10", ids + 1, lengths),
        ("ids[0] must be in [0, 9], got 92", torch.tensor([2**63 - 1, 0]), lengths),
        ("ids must have 2 elements like lengths, got 1", ids[:1], lengths),
        ("lengths must be at least 0, got -1", ids, 2 - 3 * lengths),
        ("lengths must have at least 1 field, got none", ids[:0], lengths[:0]),
    ):
        _refused(OWNER + text, lambda wrong=wrong: layer(*wrong))


@on_ranks(2)
def test_empty_bags(rank):
    """Bags without ids, and batches without samples, give zeros and change no row."""
    for settings in ({}, {"aggregate": "all_reduce"}):
        layer = _layer(**settings)
        before = layer.rows.weight.detach().clone()
        none = torch.empty(0, dtype=torch.int64)
        for batch in (3, 0):
            linear, pooled = layer(none, torch.zeros(2, batch, dtype=torch.int64))
            assert linear.shape == (batch,) and pooled.shape == (batch, 2, 2)
            assert not linear.any() and not pooled.any()
            (linear.sum() + pooled.sum()).backward()
        torch.optim.SGD([layer.rows.weight], 1.0).step()
        assert torch.equal(layer.rows.weight, before)


@on_ranks(2)
def test_operators_and_rows_must_be_the_same_on_all_ranks(rank):
    """Otherwise, a rank could receive ids of other ranks' rows, or messages of the wrong size."""
    text = "dct::FeatureRows: rows must be the same on every rank, got 10 on rank 0, 11 on rank 1"
    _refused(text, lambda: FeatureRows(torch.zeros(10 + rank, 3)))
    alone = [dist.new_group([r]) for r in range(2)][rank]
    text = f"ids_group must have ranks [0, 1] like rows, got [{rank}]"
    _refused(OWNER + text, lambda: _layer(ids_group=alone))
    rows, pair = FeatureRows(torch.randn(10, 7)), [LinearTerms(), SumPooledEmbedding(2, first=1)]
    for operators in (
        pair[: 2 - rank],
        pair[:: 1 - 2 * rank],
        [SumPooledEmbedding(2 + rank)],
        [FirstLayer(3, 2, 4 + rank)],
        pair if rank else [],  # errors are also reported if only one rank has operators
    ):
        text = f"{OWNER}operators must be the same on every rank, got ["
        _refused(text, lambda operators=operators: _of(rows, operators))
    aggregate = ("reduce_scatter", "all_reduce")[rank]
    _refused("aggregate must be the same on every rank", lambda: _of(rows, pair, aggregate))
    for name, values in (("bound", (0.1, 0.2)), ("seed", (0, 1))):
        settings = {"width": 3, "capacity": 5 + rank, name: values[rank]}
        text = f"{name} must be the same on every rank, got {values[0]} on rank 0, {values[1]} on"
        _refused(text, lambda settings=settings: DynamicFeatureRows(**settings))
    text = "every rank must do the same, got FeatureRows on rank 0, DynamicFeatureRows on rank 1"
    made = (lambda: FeatureRows(torch.zeros(10, 3)), lambda: DynamicFeatureRows(3, 5))
    _refused(text, made[rank])
    _of(DynamicFeatureRows(7, 5 + rank), pair)  # capacities may differ


@pytest.mark.parametrize("aggregate", ["reduce_scatter", "all_reduce"])
@on_ranks(2)
def test_all_ranks_raise_if_one_rank_exceeds_its_capacity(rank, aggregate):
    """All ranks raise before any row is created. Smaller batches work afterwards."""
    rows = DynamicFeatureRows(3, 4 if rank == 0 else 50)
    layer = EquivalentSubstitution(rows, [LinearTerms()], aggregate)
    everyone = torch.arange(40)
    owned = [everyone[rows.owners(everyone)[0] == owner] for owner in range(2)]

    def look_up(*counts):
        """Look up counts[0] features of rank 0, and counts[1] of rank 1."""
        parts = [ids[:count] for ids, count in zip(owned, counts, strict=True)]
        ids = torch.cat(parts) if rank == 0 or aggregate == "all_reduce" else owned[1][:1]
        (result,) = layer(ids, torch.tensor([[len(ids)]]))
        result.sum().backward()

    look_up(2, 3)
    assert len(rows) == (2, 3)[rank]
    before = rows.ids().clone(), rows.weight.detach()[: 1 + len(rows)].clone()
    rule = "capacity must be at least the number of features seen, got 4 for 6 on rank 0"
    for _ in range(2):
        _refused(OWNER + rule, lambda: look_up(6, 5))
        assert torch.equal(rows.ids(), before[0])
        assert torch.equal(rows.weight.detach()[: 1 + len(rows)], before[1])
    look_up(4, 5)  # rank 0 is now full
    assert len(rows) == (4, 5)[rank]
    look_up(4, 9)
    _refused(OWNER + rule.replace("6", "5"), lambda: look_up(5, 9))
    layer.eval()
    look_up(6, 12)
    assert len(rows) == (4, 9)[rank]


@on_ranks(2)
def test_all_ranks_raise_if_inputs_differ(rank):
    """All ranks raise for each kind of difference, and can continue afterwards."""
    ids, lengths = torch.tensor([3, 9]), torch.tensor([[1, 0], [0, 1]])
    layer, together = _layer(), _layer(aggregate="all_reduce")
    same = " must be the same on every rank, got "
    for call, text in (
        (lambda: layer(ids, lengths.repeat(1 + rank, 1)[:, : 2 - rank]), None),
        (
            lambda: layer(ids[:0], lengths[:, : 1 + rank] * 0),
            f"batch{same}1 on rank 0, 2 on rank 1",
        ),
        (lambda: layer(ids[:0], lengths[: 1 + rank] * 0), f"fields{same}1 on rank 0, 2 on rank 1"),
        (lambda: together(ids - rank, lengths), f"checksum of the batch{same}"),
        (lambda: together(ids, lengths.flip(0) if rank else lengths), "checksum of the batch"),
    ):
        _refused(text or OWNER, call)
    text = f"{OWNER}every rank must accept its input, got an error on rank 1: " * (rank == 0)
    text += f"{OWNER}ids[0] must be in [0, 9], got 10"
    for of in (layer, together):
        _refused(text, lambda of=of: of(ids + 7 * rank, lengths))
    dynamic = _of(DynamicFeatureRows(3, 50), [LinearTerms()])
    dynamic.train(rank == 0)  # in evaluation mode, a rank would create no rows for new features
    _refused(f"training{same}True on rank 0, False on rank 1", lambda: dynamic(ids, lengths))
    assert len(dynamic.rows) == 0
    with torch.set_grad_enabled(rank == 0):
        _refused("gradients must be the same on every rank", lambda: layer(ids, lengths))
    sum(result.sum() for result in layer(ids, lengths)).backward()
    first = _of(FeatureRows(torch.randn(10, 3)), [FirstLayer(2, 3, 4)])
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    first.load_state_dict(state | {"operators.0.weight": state["operators.0.weight"] + rank})
    for _ in range(2):
        _refused(f"parameters of the loaded operators{same}", lambda: first(ids, lengths))
    first.load_state_dict(state)
    first(ids, lengths)


@on_ranks(2)
def test_first_layers_must_fit_rows_and_fields(rank):
    """A wrong dtype or number of fields raises an error before any row is created."""
    rows = DynamicFeatureRows(3, 50, dtype=torch.float64)
    layer = _of(rows, [LinearTerms(), FirstLayer(2, 3, 4)])
    ids, lengths = torch.tensor([3, 9]), torch.tensor([[1, 0], [0, 1]])
    owner = "dct::FirstLayer: "
    text = f"{owner}weight must be torch.float64 like rows, got torch.float32"
    _refused(text, lambda: layer(ids, lengths), TypeError)
    layer.operators.double()
    _refused(f"{owner}lengths must have 2 fields, got 1", lambda: layer(ids, lengths.view(1, 4)))
    assert len(rows) == 0
    layer(ids, lengths)
    made = torch.tensor(len(rows))
    dist.all_reduce(made)
    assert made == 2
