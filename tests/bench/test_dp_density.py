"""experiments.dp_density: simulated ranks are real ones, rates chosen at 600 steps, runs kept."""

import argparse
import itertools
import sys

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_parallel import DCTAverager, DCTState, dct_hook
from dlrm.launch import launch
from bench.experiments import dp_density, dp_local, dp_methods, dp_ranks, dp_report, dp_tasks
from bench.network.methods import TopKState, topk_hook

STEPS = 6
TEXT = "the quick brown fox jumps over the lazy dog. " * 40
# By the names that the simulation has for them.
STATES = {
    "dct:5%": {"density": 0.05, "transport": "all_gather"},
    "dct-float32:5%": {"density": 0.05, "format": "float32", "transport": "all_gather"},
    "reduce_scatter:5%": {"density": 0.05, "transport": "reduce_scatter"},
    "int4": {"format": "int4", "transport": "all_gather"},
    "int4,transport=reduce_scatter": {"format": "int4", "transport": "reduce_scatter"},
}
TWICE = "local-int4:100%x2,transport=reduce_scatter"
AVERAGERS = {
    "local:5%x2": {"density": 0.05},
    "local-ternary:100%x2": {"transport": "all_gather"},
    TWICE: {"format": "int4", "transport": "reduce_scatter"},
    "ahead:5%,every=2": {"density": 0.05, "step_ahead": True},
    "ahead-ternary,every=2,transport=reduce_scatter": {
        "transport": "reduce_scatter",
        "step_ahead": True,
    },
}
OTHERS = ("topk:5%", "powersgd")


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _real(text, width, folder, names):
    """Weights after some steps of real ranks."""
    task = dp_tasks.TextTask(text, width, layers=1)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for name in names:
        model = module = task.model(0)
        averager = None
        if name in AVERAGERS:
            averager = DCTAverager(model, period=2, **AVERAGERS[name])
        else:
            model = DDP(module, bucket_cap_mb=1024)
            model.register_comm_hook(*_hook(name, model))
        optimizer = _optimizer(model)
        for batch in itertools.islice(task.batches(0, rank, ranks), STEPS):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
            if averager is not None:
                averager.average_parameters()
        if averager is not None:  # at an averaging
            nn.utils.vector_to_parameters(averager._base, module.parameters())
        if rank == 0:
            torch.save(module.state_dict(), folder / f"{name}.pt")


def _hook(name, ddp):
    if name in STATES:
        return DCTState(ddp, **STATES[name]), dct_hook
    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(None, 1, 2), powerSGD_hook.powerSGD_hook
    return TopKState(0.05), topk_hook


def _simulated(task, make, ranks):
    models = [task.model(0) for _ in range(ranks)]
    optimizers = [_optimizer(model) for model in models]
    updates = [lambda step, own=own: own.step() for own in optimizers]
    batches = [task.batches(0, rank, ranks) for rank in range(ranks)]
    if dp_methods.is_local(make):
        run = dp_local.train(models, task.loss, batches, make(models), updates, STEPS)
    else:
        run = dp_ranks.train(models[0], task.loss, batches, make, updates[0], STEPS)
    assert len(list(run)) == STEPS
    return models[0].state_dict()


@pytest.fixture
def one_thread():
    """As a rank computes: sums within an op are cut by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# No hooks on three ranks: they begin with dense steps, in which a ring adds in another order. The
# weights are two blocks there, and the last rank owns none.
@pytest.mark.parametrize(
    "ranks, width, names", [(2, 48, (*STATES, *AVERAGERS, *OTHERS)), (3, 32, [*AVERAGERS])]
)
def test_simulated_ranks_are_real_ones(tmp_path, one_thread, ranks, width, names):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    launch(_real, ranks, text, width, tmp_path, names)
    task = dp_tasks.TextTask(text, width, layers=1)
    for name in names:
        real = torch.load(tmp_path / f"{name}.pt")
        for key, weight in _simulated(task, dp_methods.method(name), ranks).items():
            if name == "powersgd":  # which torch computes in another order
                torch.testing.assert_close(weight, real[key], rtol=1e-4, atol=1e-6)
            else:
                assert torch.equal(weight, real[key]), (name, key)


def test_averagings_at_equal_progress_of_the_rate():
    """As many as every period-th step; with a constant rate, just those."""
    assert dp_local.equal_progress([1.0] * 12, 3) == {3, 6, 9, 12}
    rates = [8.0] * 4 + [4.0] * 4 + [2.0] * 8 + [1.0] * 16
    assert dp_local.equal_progress(rates, 8) == {3, 6, 14, 32}


@pytest.mark.parametrize("when", [{}, {"spaced": "root"}, {"spaced": "rate2"}, {"first": 20}])
def test_a_schedule_has_as_many_averagings(when):
    """At the square of the rate later ones lie further apart; some may all be at the start."""
    rates = [1 - step / 200 for step in range(200)]
    due = sorted(dp_local.schedule(rates, 5, **when))
    assert len(due) == 40 and due[-1] == 200
    gaps = [after - before for before, after in itertools.pairwise([0, *due])]
    if not when:
        assert set(gaps) == {5}
    elif "first" in when:
        assert gaps[:20] == [1] * 20 and set(gaps[20:]) == {9}
    else:
        start, end = {"root": ([4, 3, 4, 3, 4], 8), "rate2": ([2, 2, 2, 1, 2], 9)}[when["spaced"]]
        assert gaps[:5] == start and min(gaps[-2:]) >= end
    assert dp_local.schedule(rates, 5, first=40) == {*range(1, 41)}


WRONG = "int5 dct dct:1 dct:0% dct:101% reduce_scatter:x% bf16:1% dct:1%x2 local:1% local:1%x0 "
WRONG += "local-int8:10%x10 diloco local:10%x10,inner=1 dct:1%,decay=0.9 "
WRONG += "local:10%x10,spaced=steps dct:1%,outer=1 dct:1%,spaced=rate "
WRONG += "topk:1%,transport=reduce_scatter int4,transport=all_to_all"


@pytest.mark.parametrize("name", WRONG.split())
def test_a_wrong_method(name):
    with pytest.raises(argparse.ArgumentTypeError, match="must"):
        dp_methods.named(name)


def _record(name, rate, seed, loss, steps=600, problem="text-adamw", schedule="cosine"):
    parts = {part: {"loss": loss} for part in ("validation", "test")}
    curve = [[20, 20 * rate, 2 * loss], [40, 40 * rate, loss]]
    record = {"problem": problem, "schedule": schedule, "method": name, "rate": rate}
    record |= {"seed": seed, "steps": steps, "curve": curve}
    record |= {"test_curve": [[20, 2 * loss], [40, loss]]}
    return record | parts | {"bytes_per_step": 100.0 if name == "dense" else 4.0}


def test_rates_are_chosen_after_as_many_steps_by_the_seeds_that_all_have():
    records = [_record("dense", rate, 0, loss) for rate, loss in ((1, 0.5), (3, 0.4), (9, 0.6))]
    records += [_record("dense", 9, 1, 0.1), _record("dense", 1, 0, 0.1, steps=3000)]
    records += [_record("dense", 1, 0, 0.1, problem="clicks-sgd"), _record("bf16", 1, 0, 0.1)]
    records += [_record("dense", 1, 0, 0.1, schedule="wsd")]
    diverged = {key: records[0][key] for key in ("problem", "schedule", "method", "seed", "steps")}
    records += [diverged | {"rate": 27, "diverged": 5}]
    assert dp_report.best_rate(records, "text-adamw", "cosine", "dense", 600) == 3
    more = [*records, _record("dense", 1, 1, 0.3), _record("dense", 3, 1, 0.5)]
    assert dp_report.best_rate(more, "text-adamw", "cosine", "dense", 600) == 9
    assert dp_report.best_rate(records, "text-adamw", "cosine", "dense", 3000) == 1
    assert dp_report.best_rate(records, "text-adamw", "cosine", "dct:1%", 600) is None


def test_the_table_compares_seed_by_seed(tmp_path):
    records = [_record("dense", 3, seed, 1.0 + seed) for seed in range(3)]
    some = (0, 1, 3)  # seed 2 to come
    records += [_record("dct:1%", 9, seed, 1.25 + seed) | {"overflow": 0.5} for seed in some]
    lines = dp_report.tables(records).splitlines()
    assert lines[0] == "**text-adamw, cosine, 600 steps**"
    dense = "| dense | 2.0000 ± 1.0000 | 3.0000 | +0.0000 ± 0.0000 | +0.0000 |  | 100 | 1.0x | 3 |"
    assert lines[4].startswith(dense)
    assert "| 4.2500 | +0.2500 ± 0.0000 | +0.2500 | 50.0% | 4 | 25.0x | 9 | 9 | 3 |" in lines[5]
    dp_report.plot(tmp_path, records)
    assert (tmp_path / "text-adamw-cosine-600.png").stat().st_size > 1000


def test_methods_can_be_chosen_without_the_test_part(tmp_path, monkeypatch):
    """A run is trained again where its test score is asked for: at the best rate, once."""
    monkeypatch.setattr(dp_tasks, "HELD_OUT_TEXTS", 8)
    (tmp_path / "text.txt").write_text(TEXT)
    given = ["--problems", "text-adamw", "--methods", "dense", "--rates", "0.001,0.004"]
    given += ["--steps", "1", "--seeds", "1", "--width", "8", "--layers", "1"]
    given += ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path)]
    found = []
    for last in (["--validation-only"], [], ["--validation-only"]):
        dp_density.work(dp_density.parse([*given, *last]))
        found.append(dp_report.load(tmp_path))
    without, best, again = ({r["rate"]: r for r in records} for records in found)
    (rate,) = [rate for rate, record in best.items() if "test" in record]
    assert best == again and not any("test" in record for record in without.values())
    losses = {rate: record["validation"]["loss"] for rate, record in without.items()}
    assert rate == min(losses, key=losses.get)
    assert losses == {rate: record["validation"]["loss"] for rate, record in best.items()}


def test_a_warm_up_of_its_own(tmp_path, monkeypatch):
    """The first step of two at twice the rate is that of one."""
    monkeypatch.setattr(dp_tasks, "HELD_OUT_TEXTS", 8)
    (tmp_path / "text.txt").write_text(TEXT)
    given = ["--problems", "text-adamw", "--methods", "dense", "--steps", "1", "--seeds", "1"]
    given += ["--width", "8", "--layers", "1", "--text", str(tmp_path / "text.txt")]
    for rate, steps in ((0.002, 1), (0.004, 2)):
        asked = ["--rates", str(rate), "--warmup", str(steps), "--out", str(tmp_path)]
        dp_density.work(dp_density.parse([*given, *asked]))
    one, two = sorted(dp_report.load(tmp_path), key=lambda record: record["rate"])
    assert (one["warmup"], two["warmup"]) == (1, 2)
    assert one["test"] == two["test"]


@pytest.mark.large
def test_the_command_keeps_what_is_finished(tmp_path, monkeypatch, capsys):
    """Six runs of two steps each; what is there is not trained again, and goes into the report."""
    monkeypatch.setattr(dp_density, "CURVE_EVERY", 1)
    monkeypatch.setattr(dp_tasks, "HELD_OUT_TEXTS", 8)
    monkeypatch.setattr(dp_tasks, "GENERATED_CHARACTERS", 5000)
    given = ["--problems", "text-adamw", "--methods", "dense", "dct:10%", "--rates", "0.001,0.002"]
    given += ["--steps", "2", "--seeds", "2", "--text", str(tmp_path / "text.txt")]
    monkeypatch.setattr(sys, "argv", ["dp_density", *given, "--out", str(tmp_path / "runs")])
    dp_density.main()
    records = dp_report.load(tmp_path / "runs")
    assert len(records) == 6 and len((tmp_path / "text.txt").read_text()) == 5000
    task = dp_tasks.TextTask(tmp_path / "text.txt")
    dense = next(record for record in records if record["method"] == "dense")
    numel = sum(weight.numel() for weight in task.model(0).parameters())
    assert dense["bytes_per_step"] == 4 * numel  # 2 (P - 1) / P of it, in a ring of 2
    assert "| dct:10% |" in capsys.readouterr().out
    monkeypatch.setattr(dp_density, "train", lambda *args: pytest.fail("trained again"))
    dp_density.main()


def test_generated_text_is_the_same_in_every_call():
    text = dp_tasks.generate_text(3000)
    assert len(text) == 3000 and dp_tasks.generate_text(3000) == text
    assert {".", "\n", " "} < set(text) <= set("abcdefghijklmnopqrstuvwxyz .\n")


def test_clicks_of_the_ranks_are_different_rows():
    task = dp_tasks.ClicksTask(rows=3000, hash_size=50, bottom=(8,), top=(8,))
    batches = [list(itertools.islice(task.batches(0, rank, 2), 9)) for rank in range(2)]
    seen = torch.cat([batch.ints for own in batches for batch in own])
    assert len(seen) == 18 * 128
    # An epoch has each of 2,100 rows once, and has 8 batches of each rank.
    assert len(seen.unique(dim=0)) > 0.85 * len(seen)
    scores = task.score(task.model(0), "test")
    assert 0 < scores["auc"] < 1 and scores["loss"] > 0


def test_a_function_for_an_mlp():
    task = dp_tasks.BiasesTask(batch=5000)
    (x, y), (other, _) = (next(task.batches(0, rank, 2)) for rank in range(2))
    assert x.shape == (5000, dp_tasks.INPUTS) and not torch.equal(x, other)
    assert 0.6 < y.var() < 0.7
    model = task.model(0)
    task.loss(model, (x, y)).backward()
    assert all(weight.grad.any() for weight in model.parameters())
    assert task.score(model, "test")["loss"] > 0.5


def test_a_rate_rises_then_stays_or_decays_to_zero():
    def rates(schedule, *steps):
        return [dp_density.PROBLEMS["text-adamw"].rate_at(schedule, step, 600) for step in steps]

    assert rates("constant", 0, 24, 49, 599) == [0.02, 0.5, 1, 1]
    cosine = [0.02, (1 + 2**-0.5) / 2, 0.5, 0]
    assert rates("cosine", 0, 149, 300, 600) == pytest.approx(cosine, abs=0.003)
    wsd = [0.02, 1, 1, 0.5, 0]
    assert rates("wsd", 0, 49, 480, 540, 600) == pytest.approx(wsd, abs=1e-9)


def _walk(average, moves, steps):
    """Let every rank's weights move by integers, and average: `moves` [steps, ranks, numel]."""
    for step, own in enumerate(moves[:steps], start=1):
        with torch.no_grad():
            for weights, move in zip(average.weights, own, strict=True):
                weights[0] += move.view_as(weights[0])
        average(step)


def _models(ranks, numel):
    models = [torch.nn.Linear(numel, 1, bias=False) for _ in range(ranks)]
    for model in models:
        torch.nn.init.zeros_(model.weight)
    return models


def test_between_averagings_ranks_go_their_own_ways():
    moves = torch.randint(-8, 9, (6, 2, 50), generator=torch.Generator().manual_seed(0)).float()
    average = dp_methods.method("postlocal:x3")(_models(2, 50))
    _walk(average, moves, 5)
    for rank, weights in enumerate(average.weights):
        expected = moves[:3].mean(1).sum(0) + moves[3:5, rank].sum(0)
        assert torch.equal(weights[0].flatten(), expected)
    average = dp_methods.method("postlocal:x3")(_models(2, 50))
    _walk(average, moves, 6)
    for weights in average.weights:
        assert torch.equal(weights[0].flatten(), moves.mean(1).sum(0))


def test_outer_momentum_is_nesterovs():
    average = dp_methods.method("diloco:x1")(_models(2, 4))
    velocity = base = 0.0
    for _ in range(3):
        _walk(average, torch.ones(1, 2, 4), 1)
        velocity = 0.9 * velocity + 1
        base += 0.7 * (1 + 0.9 * velocity)
        torch.testing.assert_close(average.base, torch.full((4,), base))


def test_an_outer_optimizer_goes_with_compression():
    """What is sent is its gradient; the residual has nothing of it."""
    plain, outer = (
        dp_methods.method(f"local-ternary:100%x1{more}")(_models(2, 200))
        for more in ("", ",outer=0.5,momentum=0.5")
    )
    moves = torch.randn(1, 2, 200, generator=torch.Generator().manual_seed(0))
    for average in (plain, outer):
        _walk(average, moves, 1)
    torch.testing.assert_close(outer.base, 0.5 * (1 + 0.5) * plain.base)
    for one, other in zip(plain.buckets.residuals(), outer.buckets.residuals(), strict=True):
        assert torch.equal(one, other) and one.any()


@pytest.mark.parametrize("moments, averaged", [("first", [True, False]), ("both", [True, True])])
def test_moments_are_averaged(moments, averaged):
    models = _models(2, 4)
    average = dp_methods.method(f"postlocal:x2,moments={moments}")(models)
    average.optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    for step in (1, 2):
        for rank, (model, optimizer) in enumerate(zip(models, average.optimizers, strict=True)):
            model.weight.grad = torch.full((1, 4), rank + 1.0)
            optimizer.step()
        states = [own.state[m.weight] for own, m in zip(average.optimizers, models, strict=True)]
        own = [[state[name].clone() for state in states] for name in ("exp_avg", "exp_avg_sq")]
        average(step)
    for name, before, mean in zip(("exp_avg", "exp_avg_sq"), own, averaged, strict=True):
        expected = [sum(before) / 2] * 2 if mean else before
        assert torch.equal(torch.stack([s[name] for s in states]), torch.stack(expected))
    assert average.sent == (1 + sum(averaged)) * 4 * 4


def test_first_moments_are_pulled_to_what_the_mean_tells():
    """After one step of each rank, in full: then all would take the same next step."""
    models = _models(2, 4)
    average = dp_methods.method("postlocal:x1,pull=1")(models)
    average.optimizers = [
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0) for model in models
    ]
    for step in (1, 2, 3):
        before = average.base.clone()
        for model, optimizer in zip(models, average.optimizers, strict=True):
            model.weight.grad = torch.randn(1, 4)
            optimizer.step()
        average(step)
        for optimizer, model in zip(average.optimizers, models, strict=True):
            state = optimizer.state[model.weight]
            root = (state["exp_avg_sq"] / (1 - 0.999**step)).sqrt()
            again = -0.1 * state["exp_avg"] / (1 - 0.9**step) / root
            torch.testing.assert_close(again.flatten(), average.base - before)


def test_a_mean_over_senders_is_not_over_ranks():
    sent = torch.zeros(2, 9)
    sent[0, :5], sent[1, 3:8] = 4, 2
    assert dp_local.mean_over_senders(sent).tolist() == [4, 4, 4, 3, 3, 2, 2, 2, 0]


def test_a_residual_decays():
    """After every averaging, in which nothing is lost."""
    average = dp_methods.method("local:10%x1,decay=0.5")(_models(2, 1000))
    moves = torch.randint(-8, 9, (2, 2, 1000), generator=torch.Generator().manual_seed(0)).float()
    owed = torch.zeros(1000)
    for own in moves:
        before = average.base.clone()
        _walk(average, own[None], 1)
        sent = average.base - before
        left = sum(average.buckets.residuals()) / 2
        assert torch.equal(sent + 2 * left, own.mean(0) + owed)
        owed = left


def test_sparseloco_keeps_what_it_did_not_send():
    average = dp_methods.method("sparseloco:1.5625%x1")(_models(2, 5000))
    moves = torch.randn(1, 2, 5000, generator=torch.Generator().manual_seed(0))
    _walk(average, moves, 1)
    sent = moves[0] - torch.stack(average.residuals)
    assert [(own != 0).sum().item() for own in sent] == [64 + 14] * 2
    for own, move in zip(sent, moves[0], strict=True):
        for chunk, of_move, count in zip(own.split(4096), move.split(4096), (64, 14), strict=True):
            assert set(chunk.nonzero()[:, 0].tolist()) == set(of_move.abs().topk(count)[1].tolist())
        # Each of the four values is the mean of those it stands for.
        means = [move[own == value].mean() for value in own[own != 0].unique()]
        assert 2 <= len(means) <= 4
        torch.testing.assert_close(torch.stack(means), own[own != 0].unique())
    assert average.sent == 78 * 14 // 8 + 16
