"""Distributed equivalent substitution trains like one process, and its bytes match formulas."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_embeddings import (
    EquivalentSubstitution,
    FactorizationMachine,
    FeatureRows,
    FirstLayer,
    LinearTerms,
    SubstituteOperator,
    SumPooledEmbedding,
)
from support.ranks import on_ranks, run_ranks
from wire_meter import WireMeter

ROWS, FIELDS, WIDTH, BATCH, HIDDEN = 61, 3, 4, 4, 5  # BATCH: samples per step on all ranks
STEPS, LR = 20, 0.2


def _weight(dtype):
    generator = torch.Generator().manual_seed(0)
    return 0.3 * torch.randn(ROWS, 1 + WIDTH, generator=generator, dtype=torch.float64).to(dtype)


@functools.cache
def _sample(step, number, longest=3):
    """(0 to `longest` ids per field, which may repeat; a label)."""
    generator = torch.Generator().manual_seed(10 * step + number)
    lengths = torch.randint(longest + 1, (FIELDS,), generator=generator).tolist()
    ids = [torch.randint(ROWS, (length,), generator=generator) for length in lengths]
    return ids, float(torch.randint(2, (), generator=generator))


def _bags(samples):
    """The ids and lengths of samples as arguments of the layer, field by field."""
    by_field = [ids[field] for field in range(FIELDS) for ids, _ in samples]
    lengths = torch.tensor([len(ids) for ids in by_field]).view(FIELDS, len(samples))
    return torch.cat(by_field), lengths


def _labels(samples, dtype):
    return torch.tensor([label for _, label in samples], dtype=dtype)


class Plain(nn.Module):
    """The oracle: one process computes each operator by its definition, sample by sample."""

    def __init__(self, kind, dtype):
        super().__init__()
        self.weight = nn.Parameter(_weight(dtype))
        self.dense, self.first = _dense(kind, dtype), None
        if kind == "first layer":
            self.first = nn.Parameter(_first_layer(dtype))

    def forward(self, samples):
        return torch.cat([self.dense(*self._inputs(ids)) for ids, _ in samples])

    def _inputs(self, ids_by_field):
        features = self.weight[torch.cat(ids_by_field)]
        linear = features[:, 0].sum().view(1)
        products = features[:, 1:] @ features[:, 1:].T  # of all pairs
        pairs = products.triu(1).sum().view(1)
        pooled = torch.stack([self.weight[ids, 1:].sum(0) for ids in ids_by_field])[None]
        if self.first is None:
            return linear, pairs, pooled
        return linear, (self.first @ pooled.flatten())[None]


OPERATORS = {
    "DeepFM": lambda: [
        LinearTerms(),
        FactorizationMachine(WIDTH, first=1),
        SumPooledEmbedding(WIDTH, first=1),
    ],
    "first layer": lambda: [LinearTerms(), FirstLayer(FIELDS, WIDTH, HIDDEN, first=1)],
}
# Partial results per sample.
SENT = {"DeepFM": 2 + WIDTH + FIELDS * WIDTH, "first layer": 6}


class Dense(nn.Module):
    """A bias, and an MLP over the input that has several numbers per sample."""

    def __init__(self, inputs):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def forward(self, *given):
        *shallow, deep = given
        return sum(shallow) + self.bias + self.mlp(deep.flatten(1)).squeeze(1)


def _dense(kind, dtype):
    torch.manual_seed(5)
    return Dense({"DeepFM": FIELDS * WIDTH, "first layer": HIDDEN}[kind]).to(dtype)


def _first_layer(dtype):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(HIDDEN, FIELDS * WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def _loss(logits, labels):
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def _train_alone(kind, dtype):
    """The losses of all steps and the final rows, trained in one process."""
    model = Plain(kind, dtype)
    optimizer, losses = torch.optim.SGD(model.parameters(), LR), []
    for step in range(STEPS):
        samples = [_sample(step, number) for number in range(BATCH)]
        optimizer.zero_grad()
        loss = _loss(model(samples), _labels(samples, dtype))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), model.weight.detach()


def _layer(kind, dtype, **settings):
    layer = EquivalentSubstitution(FeatureRows(_weight(dtype)), OPERATORS[kind](), **settings)
    if kind == "first layer":
        layer.to(dtype)
        layer.operators[1].weight.data.copy_(_first_layer(dtype))
    return layer


def _train_on_ranks(kind, dtype, rank, aggregate):
    """The losses of all steps and the final rows, trained on all ranks."""
    ranks = dist.get_world_size()
    layer, dense = _layer(kind, dtype, aggregate=aggregate), _dense(kind, dtype)
    share = slice(None)
    if aggregate == "reduce_scatter":
        dense = DDP(dense)
        share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    parameters = [*layer.parameters(), *dense.parameters()]
    optimizer, losses = torch.optim.SGD(parameters, LR), []
    for step in range(STEPS):
        samples = [_sample(step, number) for number in range(BATCH)][share]
        optimizer.zero_grad()
        loss = _loss(dense(*layer(*_bags(samples))), _labels(samples, dtype))
        loss.backward()
        assert layer.rows.weight.grad.is_sparse
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if aggregate == "reduce_scatter":
        dist.all_reduce(losses)
        losses /= ranks
    return losses, _whole(layer.rows)


def _whole(rows):
    """The rows of all ranks by id. Each row must be on one rank."""
    whole = torch.full((ROWS, 1 + WIDTH), math.nan, dtype=rows.weight.dtype)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (rows.ids(), rows.weight.detach()))
    for ids, part in parts:
        assert whole[ids].isnan().all()
        whole[ids] = part
    return whole


def _expected(kind, dtype):
    losses, weight = _train_alone(kind, dtype)
    assert (weight - _weight(dtype)).abs().max() > 0.1, kind  # training has an effect
    return losses, weight


def _train_and_compare(rank, expected, aggregates):
    for (kind, dtype), (losses, weight) in expected.items():
        for aggregate in aggregates:
            got, rows = _train_on_ranks(kind, dtype, rank, aggregate)
            if dtype is torch.float64:
                assert (got - losses).abs().max() < 1e-12, (kind, aggregate)
                assert (rows - weight).abs().max() < 1e-12, (kind, aggregate)
            else:
                assert ((got - losses) / losses).abs().max() < 1e-5, (kind, aggregate)


def test_training_matches_one_process():
    runs = [(kind, torch.float64) for kind in OPERATORS] + [("DeepFM", torch.float32)]
    expected = {run: _expected(*run) for run in runs}
    scatter = ["reduce_scatter"]
    run_ranks(_train_and_compare, 1, {runs[0]: expected[runs[0]]}, scatter)
    run_ranks(_train_and_compare, 2, expected, [*scatter, "all_reduce"])
    run_ranks(_train_and_compare, 4, {runs[0]: expected[runs[0]]}, scatter)


@pytest.mark.parametrize("kind", OPERATORS)
@on_ranks(2)
def test_bytes_match_formulas_and_partial_results_do_not_grow_with_ids(rank, kind):
    """Checks bytes of ids, of partial results forward and backward, and of dense gradients."""
    ranks = dist.get_world_size()
    groups = [dist.new_group() for _ in range(2)]
    layer = _layer(kind, torch.float64, ids_group=groups[0])
    dense = DDP(_dense(kind, torch.float64), process_group=groups[1])
    dense.register_comm_hook(groups[1], default_hooks.allreduce_hook)
    with (
        WireMeter(groups[0]) as ids_meter,
        WireMeter(layer.rows.group) as partials_meter,
        WireMeter(groups[1]) as dense_meter,
    ):
        seen = []
        for longest in (3, 6):
            samples = [_sample(0, number, longest) for number in range(2 * rank, 2 * rank + 2)]
            ids, lengths = _bags(samples)
            loss = _loss(dense(*layer(ids, lengths)), _labels(samples, torch.float64))
            forward = partials_meter.take()
            loss.backward()
            foreign = int((~torch.isin(ids, layer.rows.ids())).sum())
            others = ranks - 1
            assert ids_meter.take() == others * (40 + 4 * FIELDS * 2) + 4 * foreign
            assert forward == others * 2 * SENT[kind] * 8
            of_operators = sum(p.nbytes for p in layer.operators.parameters())
            assert partials_meter.take() == forward + 2 * others * of_operators // ranks
            numel = sum(p.numel() for p in dense.parameters())
            assert dense_meter.take() == 2 * others * numel * 8 // ranks
            seen.append((len(ids), forward))
        assert seen[1][0] > 1.5 * seen[0][0] and seen[1][1] == seen[0][1]

    # With the same batch on all ranks, neither ids nor gradients of rows are sent.
    layer = _layer(kind, torch.float64, aggregate="all_reduce", ids_group=groups[0])
    with WireMeter(groups[0]) as ids_meter, WireMeter(layer.rows.group) as partials_meter:
        out = layer(*_bags([_sample(0, number) for number in range(2 * ranks)]))
        assert ids_meter.take() == others * 48
        assert partials_meter.take() == 2 * others * 2 * ranks * SENT[kind] * 8 // ranks
        sum(result.sum() for result in out).backward()
        assert ids_meter.take() == 0
        assert partials_meter.take() == 2 * others * of_operators // ranks


class Scaled(SubstituteOperator):
    """Multiplies pooled rows by `scale`. The gradient of `scale` is the sum of all pooled rows."""

    def __init__(self):
        super().__init__(WIDTH, first=1)
        self.scale = nn.Parameter(torch.full((), 2.0, dtype=torch.float64), requires_grad=False)

    def partial(self, rows, bags):
        return bags.sums(rows).flatten(1) * self.scale

    def combine(self, total):
        return total


@pytest.mark.parametrize("aggregate", ["reduce_scatter", "all_reduce"])
@on_ranks(2)
def test_frozen_parameters(rank, aggregate):
    """Frozen parameters get no gradient. Unfrozen or replaced parameters get the mean gradient."""
    operator = Scaled()
    layer = EquivalentSubstitution(FeatureRows(_weight(torch.float64)), [operator], aggregate)
    scatter = aggregate == "reduce_scatter"
    samples = [_sample(0, number) for number in range(2 * rank, 2 * rank + 2) if scatter]
    everyone = [_sample(0, number) for number in range(4)]
    ids, lengths = _bags(samples or everyone)
    every_id = torch.cat([ids_of[field] for ids_of, _ in everyone for field in range(FIELDS)])
    pooled = _weight(torch.float64)[every_id, 1:].sum()

    def backward():
        layer.zero_grad()
        (result,) = layer(ids, lengths)
        result.sum().backward()
        return layer.rows.weight.grad.to_dense()

    rows_grad = torch.zeros(ROWS, 1 + WIDTH, dtype=torch.float64)
    rows_grad[:, 1:] = 2.0 * torch.bincount(every_id, minlength=ROWS).unsqueeze(1)
    expected = rows_grad[layer.rows.ids()] / (2 if scatter else 1)  # the mean over ranks
    torch.testing.assert_close(backward(), expected)
    assert operator.scale.grad is None
    for _ in range(2):
        operator.scale.requires_grad_(True)
        torch.testing.assert_close(backward(), expected)
        torch.testing.assert_close(operator.scale.grad, pooled / (2 if scatter else 1))
        # Loading replaces the parameter.
        layer.load_state_dict(layer.state_dict(), assign=True)
    operator.scale.requires_grad_(rank == 0)
    text = r"parameters with gradients must be the same on every rank, got 2\d+ on rank 0, 1\d+ on"
    with pytest.raises(ValueError, match=text):
        layer(ids, lengths)
    operators = [Scaled(), Scaled()]
    operators[rank].scale.requires_grad_(True)
    layer = EquivalentSubstitution(FeatureRows(_weight(torch.float64)), operators, aggregate)
    with pytest.raises(ValueError, match=r"got 2\d+ on rank 0, 2\d+ on rank 1"):
        layer(ids, lengths)


@on_ranks(2)
def test_rows_are_distributed_evenly(rank):
    """Each row is on one rank. Ranks have similar numbers of rows, also for strided ids."""
    for rows in (2, 3, 64, 1000, 2**20 + 7):
        owned = FeatureRows(torch.arange(rows).double().view(-1, 1))
        ids = owned.ids()
        assert torch.equal(owned.weight.detach().flatten(), ids.double())
        owners, names = owned.owners(ids)
        assert (owners == rank).all() and torch.equal(owned.places(names), torch.arange(len(ids)))
        every = [None] * 2
        dist.all_gather_object(every, ids)
        assert torch.equal(torch.cat(every).sort().values, torch.arange(rows))
        assert abs(len(every[0]) - len(every[1])) <= 1
        if rows > 500:
            for start, step in ((0, 1), (0, 2), (1, 2), (0, 16)):
                some = torch.arange(start, rows, step)
                assert 0.3 < owned.owners(some)[0].double().mean() < 0.7, (rows, start, step)
