"""experiments.dp_density: equality of simulated and real ranks, learning rates, reuse of runs."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from bench.cli import UsageError
from bench.experiments import dp_density, dp_local, dp_methods, dp_ranks, dp_shards, dp_tasks, runs
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
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _power_sgd(rank, width, matrix_rank):
    """The weights after STEPS steps of torch's PowerSGD hook on two real ranks."""
    task = Task(width)
    module = task.model(0)
    model = DDP(module, bucket_cap_mb=1024)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=matrix_rank, start_powerSGD_iter=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = _optimizer(model)
    for batch in itertools.islice(task.batches(0, rank, 2), STEPS):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    for _ in range(4):  # lets gloo's threads release the hook's callbacks before the process ends
        dist.barrier()
    return module.state_dict()


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


def test_simulated_power_sgd_matches_torch(one_thread):
    real = run_ranks(_power_sgd, 2, 48, 4)[0]
    simulated = _simulated(Task(48), dp_methods.method("powersgd4"), 2)
    dense = _simulated(Task(48), dp_methods.method("dense"), 2)
    for key, weight in simulated.items():
        torch.testing.assert_close(weight, real[key], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(simulated["out.weight"], dense["out.weight"], rtol=1e-3)


def _record(method, rate, seed, loss, problem="text"):
    scores = {part: {"loss": loss} for part in ("validation", "test")}
    sent = {"bytes": {"bytes a step": 100.0 if method == "dense" else 4.0}}
    return {"problem": problem, "method": method, "rate": rate, "seed": seed} | scores | sent


def test_rates_are_compared_on_the_seeds_that_all_have():
    records = [_record("dense", rate, 0, loss) for rate, loss in ((1, 0.5), (3, 0.4), (9, 0.6))]
    records += [_record("dense", 9, 1, 0.1), _record("dense", 1, 0, 0.1, problem="clicks")]
    records += [{"problem": "text", "method": "dense", "rate": 27, "seed": 0, "diverged": 5}]
    assert runs.best_rate(records, "text", "dense") == 3
    more = [*records, _record("dense", 1, 1, 0.3), _record("dense", 3, 1, 0.5)]
    assert runs.best_rate(more, "text", "dense") == 9
    assert runs.best_rate(records, "text", "dct:1%") is None


def test_the_table_compares_seed_by_seed():
    """Differences of 1.2 - 1.0 and 1.6 - 1.2 have mean 0.3 and standard error 0.1."""
    records = [_record("dense", 3, seed, loss) for seed, loss in enumerate((1.0, 1.2, 9.0))]
    records += [_record("dct:1%", 9, seed, loss) for seed, loss in enumerate((1.2, 1.6))]
    lines = runs.tables(records).splitlines()
    assert lines[0] == "**text**"
    assert " ".join(lines[5].split()) == (
        "| dct:1% | 4 | 25.0x | 1.4000 ± 0.2828 | 1.6000 | +0.3000 ± 0.1000 | +0.4000 | 9 | 2 |"
    )


def test_finished_runs_are_reused(tmp_path, monkeypatch):
    given = ["--problems", "clicks-sgd", "--methods", "dense", "dct:10%", "--rates", "0.001,0.1"]
    given += ["--steps", "3", "--seeds", "1", "--rows", "600", "--out", str(tmp_path)]
    trained = []
    train = dp_density.train
    monkeypatch.setattr(dp_density, "train", lambda *a: trained.append(a[0]) or train(*a))
    settings = dp_density.settings_of(dp_density.parse(given))
    for _ in range(2):
        dp_density.work(dp_density.parse(given))
        assert len(trained) == 4  # two methods with two learning rates each
    dp_density.work(dp_density.parse([*given, "--seeds", "2"]))
    assert len(trained) == 6  # two methods at their best learning rates
    records = runs.load(tmp_path, settings)
    dense = next(run for run in records if run["method"] == "dense")
    numel = sum(p.numel() for p in dp_tasks.ClicksTask(rows=600).model(0).parameters())
    # In a ring all-reduce of 2 ranks, each rank sends every entry once.
    assert dense["bytes"] == {"bytes a step": 4 * numel}
    with pytest.raises(UsageError, match="--out must hold runs of one setting"):
        dp_density.work(dp_density.parse([*given, "--ranks", "4"]))
