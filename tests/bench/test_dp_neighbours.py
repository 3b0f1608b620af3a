"""experiments.dp_neighbours: what others do, on small tensors."""

import copy
import itertools

import pytest
import torch
from torch import nn

from dct_parallel.wire import all_reduce_bytes
from experiments import dp_local, dp_methods
from experiments.dp_neighbours import Accordion, StepAhead

SIZE, RANKS = 4096, 2


def _models():
    torch.manual_seed(0)
    model = nn.Linear(SIZE, 1, bias=False)
    return [model, copy.deepcopy(model)]


def _train(make, optimizer, steps=6):
    """(the first rank's weights, the averaging)"""
    models = _models()
    average = make(models)
    optimizers = [optimizer(model.parameters()) for model in models]
    generator = torch.Generator().manual_seed(1)
    batches = [iter(torch.randn(steps, 4, SIZE, generator=generator)) for _ in models]
    losses = dp_local.train(
        models,
        lambda model, batch: model(batch).square().mean(),
        batches,
        average,
        [lambda step, own=own: own.step() for own in optimizers],
        steps,
    )
    assert len(list(losses)) == steps
    assert torch.equal(models[0].weight, models[1].weight)
    return models[0].weight.detach().flatten(), average


def _momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def test_stepping_ahead_with_nothing_pending_is_local_momentum():
    exact, _ = _train(lambda models: dp_local.Dense(models, 1), _momentum)
    ahead, _ = _train(lambda models: StepAhead(models, 1.0, format="float32"), _momentum)
    torch.testing.assert_close(ahead, exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["ahead:5%", "ahead-ternary", "ahead:5%,every=2"])
def test_stepping_ahead_loses_nothing(name):
    """All that ranks' own steps moved by is in the weights or pending."""
    moved = []

    class Watched(StepAhead):
        def change(self, own):
            moved.append(sum(o.double() - a for o, a in zip(own, self.ahead, strict=True)))
            return super().change(own)

    made = dp_methods.method(name)
    start = _models()[0].weight.detach().flatten()
    end, average = _train(lambda models: Watched(models, **made.keywords), _momentum)
    pending = sum(residual.double() for residual in average.buckets.unsent())
    assert pending.abs().max() > 0
    total = RANKS * (end.double() - start) + pending
    torch.testing.assert_close(total, sum(moved), rtol=0, atol=1e-5)


def test_gradients_are_taken_at_weights_that_are_ahead():
    seen = []

    def loss(model, batch):
        seen.append(model.weight.detach().clone().flatten())
        return model(batch).square().mean()

    models = _models()
    average = StepAhead(models, 0.01)
    optimizers = [_momentum(model.parameters()) for model in models]
    batches = [itertools.repeat(torch.randn(4, SIZE)) for _ in models]
    updates = [lambda step, own=own: own.step() for own in optimizers]
    run = dp_local.train(models, loss, batches, average, updates, 2)
    next(run)
    pending = [residual.clone() for residual in average.buckets.unsent()]
    base = average.base.clone()
    next(run)
    for rank in range(RANKS):
        assert torch.equal(seen[RANKS + rank], base + pending[rank])


def test_shared_residuals_are_equal_and_counted():
    _, alone = _train(lambda models: StepAhead(models, 0.05), _momentum)
    _, shared = _train(lambda models: StepAhead(models, 0.05, share=3), _momentum)
    assert shared.sent - alone.sent == 2 * all_reduce_bytes(4 * SIZE, RANKS)
    assert torch.equal(*shared.buckets.unsent()) and not torch.equal(*alone.buckets.unsent())


def test_regimes_follow_the_norm_and_lose_nothing():
    """The first window is critical; then those before which the norm has changed by half."""
    norms = [1.0, 1.4, 1.4, 0.6, 0.6, 0.6]  # of windows
    critical = [True, True, False, False, True, False]  # the second has nothing to compare with
    exchange = Accordion([torch.Size([SIZE])], RANKS, 0.01, critical=10, window=2)
    generator = torch.Generator().manual_seed(0)
    ways = torch.randn(RANKS, SIZE, generator=generator)
    total, sums, sent = torch.zeros(SIZE).double(), torch.zeros(SIZE).double(), []
    for norm in norms:
        for _ in range(2):
            before = exchange.sent
            grads = [norm * way for way in ways]
            total += RANKS * exchange.mean(grads).double()
            sums += sum(grad.double() for grad in grads)
            sent.append(exchange.sent - before)
    assert [many > 2 * min(sent) for many in sent[::2]] == critical
    assert sent[::2] == sent[1::2]
    pending = sum(residual.double() for residual in exchange.buckets.unsent())
    torch.testing.assert_close(total + pending, sums, rtol=0, atol=1e-4)


def test_names():
    made = dp_methods.method("accordion:0.25%,critical=2.5,window=100")
    assert made.keywords == {"density": 0.0025, "critical": 2.5, "window": 100}
    for wrong in ("accordion", "ahead:1%,outer=1", "ahead:1%,spaced=rate", "dct:1%,share=3"):
        with pytest.raises(Exception, match="must be"):
            dp_methods.named(wrong)
