"""Row-wise AdaGrad, and its steps when replicas are averaged."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from dct_embeddings import MomentumScaledRowWiseAdagrad, RowWiseAdagrad

ROWS, WIDTH = 9, 5
BATCHES = [[0, 3, 3, 8, 3], [8], [1, 0, 1], [2, 2, 3, 8, 8]]  # rows 4 to 7 never occur
LR, EPS = 0.1, 1e-8


def _weights(dtype=torch.float64):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def _per_id(step):
    """One gradient for each id of a batch."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(len(BATCHES[step]), WIDTH, generator=generator, dtype=torch.float64)


def _oracle(divisor=lambda v: math.sqrt(v) + EPS):
    """Weights and accumulators after BATCHES, row by row in float64."""
    w, v = _weights().numpy().copy(), np.zeros(ROWS)
    for step, ids in enumerate(BATCHES):
        total = {}
        for row, grad in zip(ids, _per_id(step).numpy(), strict=True):
            total[row] = total.get(row, 0.0) + grad
        for row, grad in total.items():
            v[row] += sum(float(entry) ** 2 for entry in grad) / WIDTH
            w[row] -= LR * grad / divisor(v[row])
    return w, v


def _step(weight, optimizer, step, sparse=True, bags=False):
    """Train on one batch. With `bags`, each bag has one id."""
    optimizer.zero_grad()
    ids = torch.tensor(BATCHES[step])
    if bags:
        rows = nn.functional.embedding_bag(ids.view(-1, 1), weight, mode="sum", sparse=sparse)
    else:
        rows = nn.functional.embedding(ids, weight, sparse=sparse)
    rows.backward(_per_id(step).to(weight.dtype))
    optimizer.step()


def _trained(optimizer_class, dtype=torch.float64, sparse=True, bags=False, **settings):
    weight = nn.Parameter(_weights(dtype))
    optimizer = optimizer_class([weight], LR, **settings)
    for step in range(len(BATCHES)):
        _step(weight, optimizer, step, sparse, bags)
    return weight, optimizer


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_steps_match_the_oracle(dtype, tolerance, sparse, bags):
    weight, optimizer = _trained(RowWiseAdagrad, dtype, sparse, bags)
    w, v = _oracle()
    accumulator = optimizer.state[weight]["sum"]
    assert weight.dtype == accumulator.dtype == dtype
    assert np.abs(weight.detach().double().numpy() - w).max() < tolerance
    assert np.abs(accumulator.double().numpy() - v).max() < 10 * tolerance
    assert torch.equal(weight.detach()[4:8], _weights(dtype)[4:8])  # bitwise unchanged


@pytest.mark.parametrize("delayed", [False, True])  # before the first sync, pending sums are used
def test_the_scale_divides_the_accumulators_in_a_step(delayed):
    settings = {"scale": 3, "eps": 0.01, "delayed": delayed}  # this eps changes the result
    weight, optimizer = _trained(MomentumScaledRowWiseAdagrad, **settings)
    w, v = _oracle(lambda v: math.sqrt(v / 3 + 0.01))
    assert np.abs(weight.detach().numpy() - w).max() < 1e-14
    assert np.abs(optimizer.to_average(weight).numpy() - v).max() < 1e-14


def test_steps_do_not_depend_on_a_former_scale():
    """The accumulators do not depend on the scale, so results are bitwise equal."""
    weight, optimizer = _trained(MomentumScaledRowWiseAdagrad, scale=3)
    always, other = _trained(MomentumScaledRowWiseAdagrad, scale=5)
    assert torch.equal(optimizer.state[weight]["sum"], other.state[always]["sum"])
    optimizer.param_groups[0]["scale"] = 5
    always.data.copy_(weight.detach())
    for weights, their_optimizer in ((weight, optimizer), (always, other)):
        _step(weights, their_optimizer, 3)
    assert torch.equal(weight, always)


def test_default_steps_equal_those_of_row_wise_adagrad():
    plain, _ = _trained(RowWiseAdagrad)
    scaled, _ = _trained(MomentumScaledRowWiseAdagrad, scale=1)
    assert torch.allclose(plain, scaled, rtol=0, atol=2 * EPS)
    for optimizer_class, given in (
        (RowWiseAdagrad, {}),
        (MomentumScaledRowWiseAdagrad, {"scale": 4}),
    ):
        (group,) = optimizer_class([_table()], **given).param_groups
        assert optimizer_class([_table()], **given)._divisor(torch.zeros(1), group) == EPS


@pytest.mark.parametrize("delayed", [False, True])
def test_a_saved_state_resumes_bitwise(delayed):
    settings = {"scale": 2, "delayed": delayed}
    weight, optimizer = _trained(MomentumScaledRowWiseAdagrad, **settings)
    optimizer.averaged(weight, torch.arange(len(weight)))
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = nn.Parameter(weight.detach().clone())
    other = MomentumScaledRowWiseAdagrad([resumed], 1.0, scale=1)
    other.load_state_dict(saved)
    for weights, their_optimizer in ((weight, optimizer), (resumed, other)):
        _step(weights, their_optimizer, 3)
    assert torch.equal(weight, resumed)
    assert torch.equal(optimizer.to_average(weight), other.to_average(resumed))


def _replicas(count, optimizer_of):
    made = [nn.Parameter(_weights()) for _ in range(count)]
    return made, [optimizer_of(weight) for weight in made]


def _sync(weights, optimizers):
    """Average replicas of one process, as ReplicaSync does."""
    states = [
        optimizer.to_average(weight) for weight, optimizer in zip(weights, optimizers, strict=True)
    ]
    for tensors in (weights, states):
        mean = torch.stack([tensor.detach() for tensor in tensors]).mean(0)
        for tensor in tensors:
            tensor.data.copy_(mean)
    for weight, optimizer in zip(weights, optimizers, strict=True):
        optimizer.averaged(weight, torch.arange(len(weight)))


def test_delayed_replicas_average_to_a_step_with_the_averaged_gradient():
    """The step between two syncs is lr * mean(sum of gradients) / sqrt(synced v / scale)."""
    weights, optimizers = _replicas(
        3, lambda w: MomentumScaledRowWiseAdagrad([w], LR, scale=3, delayed=True)
    )
    generator = torch.Generator().manual_seed(7)

    def grads():
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    for period in range(3):
        base = weights[0].detach().clone()
        synced = optimizers[0].state[weights[0]]["sum"].clone()
        total, squares = torch.zeros_like(base), torch.zeros(ROWS, dtype=torch.float64)
        for _ in range(4):
            for weight, optimizer in zip(weights, optimizers, strict=True):
                weight.grad = grads()
                total += weight.grad
                squares += weight.grad.square().mean(1)
                optimizer.step()
        _sync(weights, optimizers)
        expected = synced + squares / 3  # the mean over replicas
        assert torch.allclose(optimizers[0].state[weights[0]]["sum"], expected, rtol=1e-13)
        if period > 0:  # the first period has no synced accumulator yet
            step = LR * (total / 3) / (synced / 3).sqrt().unsqueeze(1)
            assert torch.allclose(weights[0], base - step, rtol=0, atol=1e-14)


def _relative_step(replicas, scale, chance, noise, delayed, steps=600, rows=16, width=16):
    """Return how far the weights of averaged replicas move, relative to one group.

    The group processes all samples. The ratio is averaged over rows. In a step, a replica has a
    gradient for a row with probability `chance`. Gradients are 1 plus normal noise times `noise`.
    """
    generator = torch.Generator().manual_seed(11)
    start = torch.zeros(rows, width, dtype=torch.float64)
    together = nn.Parameter(start.clone())
    one_group = RowWiseAdagrad([together], LR)
    weights = [nn.Parameter(start.clone()) for _ in range(replicas)]
    optimizers = [
        MomentumScaledRowWiseAdagrad([w], LR, scale=scale, delayed=delayed) for w in weights
    ]
    for _ in range(steps):
        met = torch.rand(replicas, rows, 1, generator=generator) < chance
        grads = 1 + noise * torch.randn(replicas, rows, width, generator=generator)
        grads = (grads * met).double()
        together.grad = grads.mean(0)
        one_group.step()
        for weight, optimizer, grad in zip(weights, optimizers, grads, strict=True):
            weight.grad = grad
            optimizer.step()
        _sync(weights, optimizers)
    return (weights[0].detach().mean(1) / together.detach().mean(1)).mean().item()


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(
    ("chance", "noise", "expected"),
    [(0.02, 0.0, 1.0), (1.0, 5.0, 1.0), (1.0, 0.0, 2.0)],
    ids=["rare", "noisy", "clean"],
)
def test_steps_of_4_averaged_replicas(chance, noise, expected, delayed):
    """With scale 4, rare and noisy rows move the same distance as in one group."""
    assert _relative_step(4, 4, chance, noise, delayed) == pytest.approx(expected, rel=0.15)


def _table(dtype=torch.float32, shape=(4, 2)):
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def test_wrong_arguments():
    of_scaled, half = "dct::MomentumScaledRowWiseAdagrad: ", _table(torch.bfloat16)
    for text, optimizer, params, settings in (
        ("lr must be finite and a", RowWiseAdagrad, [_table()], {"lr": math.nan}),
        (r"params\[1\] must be float32 or .*, got bfloat16", RowWiseAdagrad, [_table(), half], {}),
        (r"params\[0\] must have shape .*, got \(4,\)", RowWiseAdagrad, [_table(shape=(4,))], {}),
        (f"{of_scaled}scale .* 1, got 0.5", MomentumScaledRowWiseAdagrad, [half], {"scale": 0.5}),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            optimizer(params, **settings)


def test_refused_groups_and_weights_are_not_added():
    optimizer = RowWiseAdagrad([_table()])
    with pytest.raises(TypeError, match="must be float32 or float64"):
        optimizer.add_param_group({"params": [_table(torch.float16)]})
    with pytest.raises(ValueError, match="weight must be one of params, got a different"):
        optimizer.to_average(_table())
    assert len(optimizer.param_groups) == len(optimizer.state) == 1
