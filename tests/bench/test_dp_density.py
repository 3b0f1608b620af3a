"""experiments.dp_density: simulated ranks give the weights of real ranks."""

import itertools
import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from bench.experiments import dp_groups, dp_local, dp_methods, dp_ranks, dp_shards, dp_tasks
from dct_parallel import DCTAverager, DCTState, compress_fully_shard, dct_hook
from support.ranks import run_ranks

STEPS = 6
# {name in the simulation: arguments}
STATES = {
    "dct:5%": {"density": 0.05, "transport": "all_gather"},
    "reduce_scatter:5%": {"density": 0.05, "transport": "reduce_scatter"},
    "int4": {"format": "int4", "transport": "all_gather"},
    "int4,transport=reduce_scatter": {"format": "int4", "transport": "reduce_scatter"},
}
AVERAGERS = {
    "local:5%x2": (2, {"density": 0.05}),
    "local-ternary:x2": (2, {"transport": "all_gather"}),
    "local-int4:x2,transport=reduce_scatter": (
        2,
        {"format": "int4", "transport": "reduce_scatter"},
    ),
    "ahead:5%": (1, {"density": 0.05, "step_ahead": True}),
    "ahead:5%,transport=reduce_scatter": (
        1,
        {"density": 0.05, "step_ahead": True, "transport": "reduce_scatter"},
    ),
}


class Task:
    """A small transformer on random text."""

    def __init__(self, width):
        self.width = width

    def model(self, seed):
        torch.manual_seed(seed)
        return dp_tasks.Transformer(20, self.width, layers=1)

    def batches(self, seed, rank, ranks):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        while True:
            yield torch.randint(20, (8, 17), generator=generator)

    def loss(self, model, batch):
        return dp_tasks.next_character_loss(model, batch)


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _real(rank, width, ranks, names):
    """{name: weights after STEPS steps on real ranks}."""
    task, found = Task(width), {}
    for name in names:
        model = module = task.model(0)
        averager = None
        if name in AVERAGERS:
            period, settings = AVERAGERS[name]
            averager = DCTAverager(model, period=period, **settings)
        else:
            model = DDP(module, bucket_cap_mb=1024)
            model.register_comm_hook(DCTState(model, **STATES[name]), dct_hook)
        optimizer = _optimizer(model)
        for batch in itertools.islice(task.batches(0, rank, ranks), STEPS):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
            if averager is not None:
                averager.average_parameters()
        if averager is not None:  # compare the weights after the last averaging
            nn.utils.vector_to_parameters(averager._base, module.parameters())
        found[name] = module.state_dict()
    return found


def _sharded(rank, width, ranks, weights, gradients):
    """The weights after STEPS steps of FSDP2 on real ranks, and the bytes sent."""
    warnings.filterwarnings("ignore", ".* returned a view tensor")  # no code writes to the view
    task = Task(width)
    model = task.model(0)
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=False)
    state = compress_fully_shard(model, weights=weights, gradients=gradients)
    optimizer, sent = _optimizer(model), 0
    for batch in itertools.islice(task.batches(0, rank, ranks), STEPS):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        sent += state.stats()["wire_bytes"]
    model.reshard()
    return {name: weight.full_tensor() for name, weight in model.state_dict().items()}, sent


def _simulated(task, make, ranks):
    models = [task.model(0) for _ in range(ranks)]
    optimizers = [_optimizer(model) for model in models]
    updates = [lambda step, opt=opt: opt.step() for opt in optimizers]
    batches = [task.batches(0, rank, ranks) for rank in range(ranks)]
    if dp_methods.is_local(make):
        run = dp_local.train(models, task.loss, batches, make(models), updates, STEPS)
    elif make.func is dp_shards.Shards:
        shards = make(models[0], ranks)
        run = dp_shards.train(models[0], task.loss, batches, shards, updates[0], STEPS)
    else:
        run = dp_ranks.train(models[0], task.loss, batches, make, updates[0], STEPS)
    assert len(list(run)) == STEPS
    return models[0].state_dict()


@pytest.fixture
def one_thread():
    """Use one thread, as each rank does. The number of threads affects the rounding of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Hooks are tested on two ranks only. Their first steps are dense, and a ring of three ranks sums
# these gradients in an order that the simulation does not use.
@pytest.mark.parametrize(
    "ranks, width, names", [(2, 48, (*STATES, *AVERAGERS)), (3, 32, AVERAGERS)]
)
def test_simulated_ranks_equal_real_ranks(one_thread, ranks, width, names):
    real = run_ranks(_real, ranks, width, ranks, tuple(names))[0]
    for name in names:
        simulated = _simulated(Task(width), dp_methods.method(name), ranks)
        for key, weight in simulated.items():
            assert torch.equal(weight, real[name][key]), (name, key)


@pytest.mark.parametrize("ranks, width", [(2, 48), (3, 32)])  # 3 ranks have uneven shards
@pytest.mark.parametrize("formats", [("int8", "int4"), ("bfloat16", "int8")], ids="-".join)
def test_simulated_shards_equal_fsdp2(one_thread, ranks, width, formats):
    make, task = dp_methods.method("fsdp-" + "-".join(formats)), Task(width)
    real, sent = run_ranks(_sharded, ranks, width, ranks, *formats)[0]
    for name, weight in _simulated(task, make, ranks).items():
        assert torch.equal(weight, real[name]), name
    assert sent == STEPS * make(task.model(0), ranks).step_bytes


def test_process_groups_train_like_simulated_ranks(one_thread):
    task = Task(192)  # of more than 1 MiB, so that the group compresses
    dense = _simulated(task, dp_methods.method("dense"), 2)
    for format, tolerance in (("float32", 1e-6), ("int8", 1e-3)):
        model, group = task.model(0), dp_methods.method(f"fsdp1-{format}")()
        batches = [task.batches(0, rank, 2) for rank in range(2)]
        updates = _optimizer, lambda optimizer: lambda step: optimizer.step()
        run = dp_groups.train(model, task.loss, batches, group, *updates, STEPS)
        assert len(list(run)) == STEPS
        differences = [(weight - dense[name]).abs() for name, weight in model.state_dict().items()]
        largest = max(each.max() for each in differences)
        assert largest < tolerance and (largest > 1e-5) == (format == "int8")
        numel = sum(weight.numel() for weight in dense.values())
        assert group.sent == pytest.approx(
            STEPS * numel * {"float32": 2, "int8": 0.516}[format], 0.01
        )


@torch.no_grad()
def test_diloco_is_nesterov_sgd_on_the_mean_change():
    models = [nn.Linear(4, 3) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    diloco = dp_methods.method("diloco:x5")(models)
    weights = [weight.clone() for weight in models[0].parameters()]
    outer = torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        for model in models:
            for weight, own in zip(weights, model.parameters(), strict=True):
                own += torch.randn_like(own)
                weight.grad += (weight - own) / len(models)
        outer.step()
        diloco.average()
        for model in models:
            for weight, own in zip(weights, model.parameters(), strict=True):
                torch.testing.assert_close(own, weight)
    assert diloco.sent == 3 * 2 * 2 * 15 * 4 // 3  # all-reduces of 15 weights


class SumsGradients(torch.optim.SGD):
    """An optimizer that exchanges gradients by itself, as those of dp_peers do."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad)
            dist.broadcast(parameter.grad, 0)
            dist.all_gather([torch.empty_like(parameter) for _ in range(2)], parameter.grad)
            parameter.grad /= dist.get_world_size()
        super().step()


def test_optimizers_that_exchange_data_themselves(one_thread, monkeypatch):
    monkeypatch.setitem(sys.modules, "demo", types.SimpleNamespace(DeMo=SumsGradients))
    task, group = Task(32), dp_methods.method("demo")()
    model, batches = task.model(0), [task.batches(0, rank, 2) for rank in range(2)]
    updates = _optimizer, lambda optimizer: lambda step: optimizer.step()
    assert len(list(dp_groups.train(model, task.loss, batches, group, *updates, STEPS))) == STEPS
    for name, weight in _simulated(task, dp_methods.method("dense"), 2).items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-6)
    assert group.sent == 3 * STEPS * sum(weight.nbytes for weight in model.parameters())
