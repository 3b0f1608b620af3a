"""DCTAverager: what it computes, that ranks stay equal, and that it goes on where it was."""

import copy
import io
import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer

from dct_kernels import payload_layout
from dct_parallel import DCTAverager, DCTState, WireMeter, merge_states
from dct_parallel.exchange import all_gather as by_all_gather
from dct_parallel.wire import all_reduce_bytes
from ranks import assert_same, batch, ddp, entry, gathered, mlp, run_ranks, train_step, weights

PERIOD = 3


def _model(rank=0):
    """Equal in shape, not in weights: the averager makes them equal."""
    model = mlp(32, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    return model


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(model, optimizer, averager, rank, steps):
    for step in steps:
        train_step(model, optimizer, *batch(step, rank, 32))
        averager.average_parameters()


def _dense_oracle(rank):
    """At density 1 nothing waits: weights are the base plus the mean of what ranks moved by."""
    model, alone = _model(rank), _model(0)  # the first rank's weights go to all
    averager = DCTAverager(model, density=1, period=PERIOD, value_dtype=torch.float32)
    optimizer, own = _adamw(model), _adamw(alone)
    base = weights(alone)
    for step in range(2 * PERIOD):
        train_step(alone, own, *batch(step, rank, 32))
        _train(model, optimizer, averager, rank, [step])
        if (step + 1) % PERIOD == 0:
            moved = gathered(weights(alone) - base)
            base += (moved[0] + moved[1]) / 2
            nn.utils.vector_to_parameters(base.clone(), alone.parameters())
        assert torch.equal(weights(model), weights(alone)), step
    return weights(model)


def test_at_density_1_it_is_the_mean_of_all_moves_bit_for_bit():
    first, second = run_ranks(_dense_oracle, 2)
    assert torch.equal(first, second)


def _low_precision(rank):
    """Half of an ulp of bfloat16 is averaged at a time: weights move at every second one."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    model = nn.ParameterList([torch.full((3000,), 256.0, dtype=dtype) for dtype in dtypes])
    averager = DCTAverager(model, density=1, period=1, value_dtype=torch.float32)
    base = torch.full((3000,), 256.0)
    for _ in range(1, 8):
        with torch.no_grad():
            for parameter in model:
                parameter += 2 * (rank == 0)
        averager.average_parameters()
        base += 1
        for parameter in model:
            assert torch.equal(parameter, base.to(parameter.dtype))
    saved = entry(averager.state_dict())["parameters"].values()
    assert all(torch.equal(state["base"], base) for state in saved)


def test_weights_of_few_bits_have_a_base_in_float32():
    run_ranks(_low_precision, 2)


def _flushed(rank):
    """Moves are exact; what waits arrives at once, in whichever step."""
    dtypes = torch.float32, torch.bfloat16
    model = nn.ParameterList([torch.zeros(3000, dtype=dtype) for dtype in dtypes])
    averager = DCTAverager(model, density=0.05, period=2)
    generator = torch.Generator().manual_seed(rank)
    moved = torch.zeros(6000)
    for step in range(1, 8):
        move = torch.randint(-8, 9, (2, 3000), generator=generator) / 8.0
        moved += move.flatten()
        with torch.no_grad():
            for parameter, part in zip(model, move, strict=True):
                parameter += part
        averager.average_parameters()
        if step in (4, 7):
            waits = [s["residual"] for s in entry(averager.state_dict())["parameters"].values()]
            assert torch.cat(waits).count_nonzero() > 1000
            with WireMeter() as meter:
                averager.flush()
                assert meter.take() == all_reduce_bytes(4 * 6000, 2)
            saved = entry(averager.state_dict())["parameters"].values()
            assert not any(state["residual"].any() for state in saved)
            mean = sum(gathered(moved)) / 2
            assert torch.equal(torch.cat([state["base"] for state in saved]), mean)
            assert torch.equal(model[1], mean[3000:].bfloat16())
    assert averager.step == 7
    before = averager.state_dict()
    with torch.no_grad():
        model[0][0] = torch.inf if rank else 1.0
    with pytest.raises(RuntimeError, match="dct::flush: weights must be finite on every rank"):
        averager.flush()
    assert torch.equal(entry(before)["parameters"]["0"]["base"], averager._base[:3000])


def test_a_flush_sends_all_that_waits():
    run_ranks(_flushed, 2)


def _flushed_after_a_load(rank):
    """Rank 0 goes back to an earlier state, rank 1 to a later one."""
    model = nn.ParameterList([torch.zeros(300)])
    averager = DCTAverager(model, density=0.1, period=1)
    states = []
    for _ in range(2):
        with torch.no_grad():
            model[0] += torch.randn(300)
        averager.average_parameters()
        states.append(averager.state_dict())
    averager.load_state_dict(states[rank])
    with pytest.raises(ValueError, match="step must be the same on every rank, got 1 on rank 0, 2"):
        averager.flush()


def test_a_flush_after_different_loads_is_refused():
    run_ranks(_flushed_after_a_load, 2)


def _told(rank):
    model = nn.Linear(1000, 100, bias=False)
    averager = DCTAverager(model, density=0.1, period=10)
    assert averager.stats() == {
        "step": 0,
        "density": None,
        "overflow": 0.0,
        "wire_bytes": averager.wire_bytes,
        "under_way": False,
    }
    for _ in range(20):
        with torch.no_grad():
            model.weight += torch.randn(100, 1000)
        averager.average_parameters()
    stats = averager.stats()
    assert stats["step"] == 20 and 0.05 < stats["density"] < 0.126
    return averager.plan()


def test_what_it_sends_is_told():
    for plan in run_ranks(_told, 2):
        assert "all_gather (local steps)" in plan and "bytes/averaging" in plan
        # 12,500 entries of 4 bytes, a header and 8 starts: 50,112 bytes; dense: 400,000.
        assert "That is 8.0x fewer bytes than the all-reduce." in plan
        assert plan.endswith("Every 10 steps: 5,011 bytes a step, 79.8x fewer than that.")


def _equal_ranks(rank, period):
    """In which of 10,000 steps the ranks averaged; they are equal after each thousandth."""
    model = nn.Linear(20, 20)
    averager = DCTAverager(model, density=0.1, period=period)
    finish, averaged = averager._bucket.finish, []
    averager._bucket.finish = lambda out: averaged.append(averager.step) or finish(out)
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, 10_001):
        with torch.no_grad():
            model.weight[step % 20] += torch.rand((), generator=generator)
        averager.average_parameters()
        if step % 1000 == 0:
            assert_same(weights(model))
    return averaged


def test_ranks_agree_over_ten_thousand_steps():
    first, second = run_ranks(_equal_ranks, 2, 40)
    assert first == second == list(range(40, 10_001, 40))


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _resumed(rank, overlap, dtype):
    """A run that saves after each step, and those that go on from there, against one that does
    not."""

    def make(seed):
        model = _model(seed).to(dtype)
        averager = DCTAverager(model, 0.1, PERIOD, overlap=overlap, residual_decay=0.9)
        return model, _adamw(model), averager

    def step(number, model, optimizer, averager):
        x, y = batch(number, rank, 32)
        train_step(model, optimizer, x.to(dtype), y.to(dtype))
        averager.average_parameters()

    undisturbed, saving, saved, after = make(rank), make(rank), [], []
    for number in range(4 * PERIOD):
        step(number, *undisturbed)
        step(number, *saving)
        saved.append(_through_a_file([part.state_dict() for part in saving]))
        after.append(weights(undisturbed[0]))
        assert torch.equal(weights(saving[0]), after[-1])
    resumed = make(5)
    for stop in range(PERIOD, 2 * PERIOD + 1):
        for part, state in zip(resumed, saved[stop - 1], strict=True):
            part.load_state_dict(state)
        averager = resumed[2]
        assert averager.step == stop
        assert averager.stats()["under_way"] == (stop % PERIOD < overlap)
        _require_same_state(averager.state_dict(), saved[stop - 1][2])
        for number in range(stop, 4 * PERIOD):  # ends within an exchange: the next load forgets it
            step(number, *resumed)
            assert torch.equal(weights(resumed[0]), after[number]), (stop, number)
        _require_same_state(averager.state_dict(), saved[-1][2])


def _require_same_state(state, other):
    for name, parts in entry(state)["parameters"].items():
        for key, value in parts.items():
            assert torch.equal(value, entry(other)["parameters"][name][key]), (name, key)
    assert torch.equal(entry(state)["recent"].nan_to_num(), entry(other)["recent"].nan_to_num())


@pytest.mark.parametrize(
    ("overlap", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (PERIOD - 1, torch.float32)]
)
def test_resumed_after_any_step_is_undisturbed_bit_for_bit(overlap, dtype):
    run_ranks(_resumed, 2, overlap, dtype)


def _merged(rank):
    """Both ranks go on from the mean of their residuals, with the base and the period of before."""
    model = _model()
    averager, optimizer = DCTAverager(model, density=0.1, period=PERIOD), _adamw(model)
    _train(model, optimizer, averager, rank, range(2 * PERIOD))
    base, states = weights(model), [None, None]
    dist.all_gather_object(states, averager.state_dict())
    merged = merge_states(states)
    with pytest.raises(ValueError, match=r"period must be 2, as in this run, got 3"):
        DCTAverager(model, density=0.1, period=2).load_state_dict(merged)
    again = DCTAverager(_model(5), density=0.1, period=PERIOD)
    again.load_state_dict(merged)
    assert again.step == 2 * PERIOD
    now = entry(again.state_dict())["parameters"]
    assert torch.equal(torch.cat([parts["base"] for parts in now.values()]), base)
    for name, parts in now.items():
        ours, theirs = (entry(state)["parameters"][name]["residual"] for state in states)
        assert torch.equal(parts["residual"], ((ours.double() + theirs.double()) / 2).float())


def test_merged_states_are_loaded():
    run_ranks(_merged, 2)


def _late(rank):
    """Local steps after a load may take ranks as long as they do."""
    averager = DCTAverager(_model(), period=1)
    averager.average_parameters()
    averager.load_state_dict(averager.state_dict())
    time.sleep(rank)
    averager.average_parameters()


def test_ranks_may_be_apart_after_a_load():
    run_ranks(_late, 2)


def _refuses_other_states(rank):
    model = _model()
    averager = DCTAverager(model, density=0.1)
    other = DCTState(ddp(_model()), density=0.1)
    with pytest.raises(ValueError, match="state must be a DCTAverager's, got one without a base"):
        averager.load_state_dict(other.state_dict())
    bare = other.state_dict()
    entry(bare)["parameters"].clear()
    text = "state must be a DCTAverager's, got one without a base"
    with pytest.raises(ValueError, match=text):
        averager.load_state_dict(bare)
    with pytest.raises(ValueError, match="state must be a DCTState's, got a DCTAverager's"):
        other.load_state_dict(averager.state_dict())
    with pytest.raises(ValueError, match=r"density must be 0\.1"):
        averager.load_state_dict(DCTAverager(model, density=0.2).state_dict())
    other.close()


def test_other_states_are_refused():
    run_ranks(_refuses_other_states, 2)


def _bytes(rank):
    model = nn.ParameterList([torch.zeros(5000), torch.zeros(30)])
    averager = DCTAverager(model, density=0.02, period=2)
    with WireMeter() as meter:
        for _ in range(4):
            averager.average_parameters()
        sent = meter.take()
    assert sent == 2 * (averager.wire_bytes + all_reduce_bytes(8, 2))  # and whether it arrived
    assert averager.wire_bytes == payload_layout(5030, 126, torch.bfloat16).nbytes


def test_bytes_are_counted():
    run_ranks(_bytes, 2)


def _under_post_local_sgd(rank):
    model, plain = _model(), _model()
    averager, other = (DCTAverager(m, density=0.1, period=2) for m in (model, plain))
    wrapped, optimizer = PostLocalSGDOptimizer(_adamw(model), averager), _adamw(plain)
    for step in range(6):
        train_step(model, wrapped, *batch(step, rank, 32))
        _train(plain, optimizer, other, rank, [step])
    assert torch.equal(weights(model), weights(plain))


def test_torchs_post_local_sgd_takes_it():
    run_ranks(_under_post_local_sgd, 2)


def _skipped_on_one_rank(rank):
    model = nn.Linear(300, 1, bias=False)
    averager = DCTAverager(model, density=1, period=1, value_dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = weights(model)
    loss = model(torch.ones(1, 300)).sum()
    scaler.scale(loss * torch.inf if rank else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights(model), before) == (rank == 1)
    averager.average_parameters()
    assert torch.equal(weights(model), before + ((before - 1) - before) / 2)
    (saved,) = entry(averager.state_dict())["parameters"].values()
    assert not saved["residual"].any()


def test_a_step_that_one_ranks_scaler_skips_is_one_that_it_did_not_move_in():
    run_ranks(_skipped_on_one_rank, 2)


class _Damaging:
    """Of a payload from rank 1, its first byte, on its way to rank 0."""

    def __init__(self, work, received):
        self._work, self._received = work, received

    def wait(self):
        self._work.wait()
        self._received[1, 0] ^= 0xFF  # the magic


def _refused(rank, fault, value_dtype, overlap):
    """Moves of an eighth and its multiples; something is wrong in the third averaging."""
    period = overlap + 1
    model = nn.ParameterList([torch.zeros(5000), torch.zeros(70)])
    averager = DCTAverager(model, 0.05, period, value_dtype=value_dtype, overlap=overlap)
    all_gather = by_all_gather.all_gather

    def in_flight(output, tensor, group, async_op):
        work = all_gather(output, tensor, group, async_op)
        bad = fault == "damage" and averager.step == 3 * period and rank == 0
        return _Damaging(work, output) if bad else work

    by_all_gather.all_gather = in_flight
    generator = torch.Generator().manual_seed(rank)
    moved, said = torch.zeros(5070, dtype=torch.float64), None
    for step in range(1, 8 * period + 1):
        move = torch.randint(-8, 9, (5070,), generator=generator) / 8.0
        move[7] = 0  # where it would be lost
        with torch.no_grad():
            for parameter, part in zip(model, move.split([5000, 70]), strict=True):
                parameter += part
            if fault == "nan" and step == 3 * period and rank == 1:
                model[0][7] = torch.nan
        base = averager._base.clone()
        moved += move
        try:
            averager.average_parameters()
        except RuntimeError as error:
            assert step == 3 * period + overlap and said is None
            assert torch.equal(weights(model), base)
            assert_same(base)
            said = str(error)
        assert_same(averager._base)
    assert averager._base.count_nonzero() > 1000
    averager.flush()
    assert_same(weights(model))
    assert torch.equal(2 * weights(model).double(), sum(gathered(moved)))
    return said


@pytest.mark.parametrize(
    ("fault", "value_dtype", "overlap"),
    [
        ("nan", torch.float32, 0),
        ("nan", torch.bfloat16, 1),
        ("nan", "e3m0", 0),
        ("damage", torch.bfloat16, 0),
        ("damage", "e3m0", 1),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_on_every_rank_and_nothing_is_lost(
    fault, value_dtype, overlap
):
    rule = "dct::average_parameters: {} must be {}, got {}"
    nan = "weights at averaging 3", "finite on every rank"
    expected = {
        "nan": [
            rule.format(*nan, "NaN or Inf on another rank"),
            rule.format(*nan, "NaN or Inf in 0"),
        ],
        "damage": [
            rule.format(f"every payload {when} averaging 3", "intact", f"{got}: training can go on")
            for when, got in (
                ("of", "status 1 from rank 1 in bucket 0"),
                ("up to", "a damaged one on rank 0"),
            )
        ],
    }
    assert run_ranks(_refused, 2, fault, value_dtype, overlap) == expected[fault]


def _apart(rank):
    """Rank 1 begins an exchange late, and is gone before it arrives."""
    group, store = dist.new_group(timeout=timedelta(seconds=5)), dist.group.WORLD.get_group_store()
    averager = DCTAverager(_model(), period=3, overlap=2, process_group=group)
    for _ in range(5):  # as the first one begins they compare steps
        averager.average_parameters()
    if rank == 1:
        store.wait(["rank 0 went on"])
        averager.average_parameters()
        return
    averager.average_parameters()
    averager.average_parameters()
    assert averager.stats()["under_way"]
    store.set("rank 0 went on", "")
    averager.state_dict()  # of one rank alone
    with pytest.raises(RuntimeError, match=r"(?i)timed out|closed"):
        averager.average_parameters()


def test_ranks_wait_for_others_as_an_exchange_arrives_and_until_the_timeout():
    run_ranks(_apart, 2)


def _settings_that_differ(rank):
    settings = {"period": (2, 3), "residual_decay": (1.0, 0.5), "overlap": (0, 1)}
    for name, values in settings.items():
        got = "got {} on rank 0, {} on rank 1".format(*values)
        with pytest.raises(ValueError, match=f"{name} must be the same on every rank, {got}"):
            DCTAverager(_model(), **{name: values[rank]})


def test_ranks_with_other_settings_raise():
    run_ranks(_settings_that_differ, 2)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "module, arguments, error, text",
    [
        (nn.Linear(2, 2), {"period": 0}, ValueError, "period must be "),
        (nn.Linear(2, 2), {"residual_decay": 0}, ValueError, r"residual_decay must be in \(0, 1\]"),
        (nn.Linear(2, 2), {"residual_decay": 1.1}, ValueError, "residual_decay must be .* got 1.1"),
        (nn.Linear(2, 2), {"residual_decay": "x"}, TypeError, "residual_decay must be a number"),
        (nn.Linear(2, 2), {"overlap": 10}, ValueError, r"overlap must be in \[0, 9\], got 10"),
        (nn.Linear(2, 2), {"overlap": -1, "period": 1}, ValueError, r"overlap must be in \[0, 0\]"),
        (nn.Linear(2, 2), {"overlap": 0.5}, TypeError, "overlap must be an integer, got float"),
        (nn.Linear(2, 2), {"density": 0.0}, ValueError, "density must be "),
        (nn.Linear(2, 2), {"value_dtype": torch.float16}, TypeError, "value_dtype must be "),
        (nn.Linear(2, 2).double(), {}, TypeError, "parameter weight must be float32, .* float64"),
        (nn.ReLU(), {}, ValueError, "module must have parameters that require grad"),
        ([], {}, TypeError, "module must be an nn.Module, got list"),
        (nn.Linear(2, 2, device="meta"), {}, ValueError, "module must be on one device"),
    ],
)
def test_a_wrong_argument(one_rank, module, arguments, error, text):
    with pytest.raises(error, match=f"dct::DCTAverager: {text}"):
        DCTAverager(module, **arguments)


def test_a_parameter_may_have_strides(one_rank):
    model = nn.ParameterList([nn.Parameter(torch.arange(7.0)[::2])])
    averager = DCTAverager(model, density=1, period=1, value_dtype=torch.float32)
    averager.average_parameters()
    assert model[0].tolist() == [0.0, 2.0, 4.0, 6.0]


def test_ddp_is_refused(one_rank):
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    for module in (model, nn.Sequential(nn.ReLU(), model)):
        text = "dct::DCTAverager: module must be without DistributedDataParallel, .*, got "
        with pytest.raises(TypeError, match=text + type(module).__name__):
            DCTAverager(module)


def test_a_copy_is_refused(one_rank):
    module = nn.Linear(3, 3)
    module.averager = DCTAverager(module)
    for make in (copy.deepcopy, copy.copy, pickle.dumps, torch.optim.swa_utils.AveragedModel):
        text = r"an averager must not be copied or pickled \(save its state_dict\(\)\)"
        with pytest.raises(TypeError, match=f"dct::DCTAverager: {text}"):
            make(module.averager if make is copy.copy else module)


class _Mixed(nn.Module):
    """Frozen parameters of every kind, between two that are trained."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(300))
        frozen = [
            torch.randn(40, 3),
            torch.randn(4, 5).t(),
            torch.randn(()),
            torch.randn(0),
            torch.randn(7).bfloat16(),
            torch.randn(7).double(),
            torch.randint(-99, 99, (5, 5), dtype=torch.int8),
            torch.randint(99, (3,)),
            torch.randn(50) > 0,
            torch.randn(4, dtype=torch.complex64),
        ]
        self.frozen = nn.ParameterList(nn.Parameter(value, False) for value in frozen)
        self.last = nn.Parameter(torch.randn(30, 20))
        self.register_buffer("own", torch.randn(3))


def _frozen(rank):
    torch.manual_seed(rank)
    model = _Mixed()
    strides = [p.stride() for p in model.parameters()]
    own = model.own.clone()
    DCTAverager(model)
    assert [p.stride() for p in model.parameters()] == strides
    assert torch.equal(model.own, own)
    torch.manual_seed(0)
    expected = dict(_Mixed().named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        assert parameter.requires_grad == (name in ("first", "last"))
    return len(expected)


def test_all_parameters_are_those_of_the_first_rank_at_the_start():
    assert run_ranks(_frozen, 2) == [12, 12]


def _frozen_on_one_rank(rank):
    model = _model()
    model[0].bias.requires_grad_(rank == 0)
    with pytest.raises(ValueError, match="model must be the same on every rank, got 6 parameters"):
        DCTAverager(model)
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30 + rank, 3))
    model[1].requires_grad_(False)
    with pytest.raises(ValueError, match="frozen must be the same on every rank, got 2 parameters"):
        DCTAverager(model)


def test_ranks_with_other_frozen_parameters_raise():
    run_ranks(_frozen_on_one_rank, 2)


def _unfrozen(rank):
    """Raises at the averaging, changes nothing, and once it is frozen again goes on as a twin."""
    models = []
    for disturbed in (False, True):
        model = _model(rank)
        model[0].bias.requires_grad_(False)
        averager = DCTAverager(model, density=0.5, period=2)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        _train(model, optimizer, averager, rank, [0, 1, 2])
        train_step(model, optimizer, *batch(3, rank, 32))
        if disturbed:
            _changes_of_parameters(model, averager)
        averager.average_parameters()
        assert averager.step == 4
        assert_same(weights(model))
        models.append(model)
    assert torch.equal(*map(weights, models))


def _changes_of_parameters(model, averager):
    before = weights(model)

    def raises(names):
        text = "module must have the same parameters that require grad as when .*, got a diff"
        with pytest.raises(ValueError, match=rf"{text}erence in {names}: make a new averager"):
            averager.average_parameters()
        assert torch.equal(weights(model), before) and averager.step == 3

    model[0].bias.requires_grad_(True)
    raises(r"0\.bias")
    model[0].bias.requires_grad_(False)
    model[0].weight.requires_grad_(False)
    raises(r"0\.weight")
    model[0].weight.requires_grad_(True)
    model.added = nn.Linear(2, 2)
    before = weights(model)
    raises(r"added\.bias, added\.weight")
    del model.added
    before, whole = weights(model), model[0].weight
    model[0].weight = nn.Parameter(whole.detach().clone())
    raises(r"0\.weight")
    model[0].weight = whole


def test_parameters_that_are_unfrozen_or_added_later_are_an_error():
    run_ranks(_unfrozen, 2)


def test_a_weight_that_is_not_trained_stays_out(one_rank):
    model = nn.Linear(300, 2)
    model.bias.requires_grad_(False)
    averager = DCTAverager(model, density=1, period=1)
    assert list(entry(averager.state_dict())["parameters"]) == ["weight"]
