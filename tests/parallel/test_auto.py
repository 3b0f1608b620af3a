"""Transport "auto" on a link that is known: each bucket goes as is fastest there."""

import dataclasses
import json
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTState, WireMeter, dct_hook
from dct_parallel.data_parallel import gather
from dct_parallel.data_parallel.bucket_plan import Settings
from dct_parallel.data_parallel.choice import Choice
from dct_parallel.data_parallel.link import Cost, Link, read
from ranks import Dictated, entry, gathered, owed, run_ranks, weights

FREE = Cost(0.0, 0.0)
# An all-gather takes a millisecond to start: what is sent in less by an all-reduce goes by that.
MIXED = Link(Cost(1e-3, 1e-8), Cost(1e-3, 1e-8), Cost(0.0, 1e-8), 0.0, 0.0, 0.0)
SIZES = (20_000, 100, 100_000)  # 40 kB in bfloat16 and 200 kB: 0.4 and 2 ms on 2 ranks


def _chosen(link, ranks, numel, density=0.005):
    settings = Settings(density, 1000, "fresh", torch.bfloat16)
    return Choice("auto", link).plan(("p",), (numel,), settings, ranks).transport.name


@pytest.mark.parametrize(
    "link, ranks, numel, name",
    [
        # 100 MB/s, nothing else: by bytes. On 2 ranks gather and shard send as many.
        (Link(Cost(0, 1e-8), Cost(0, 1e-8), Cost(0, 1e-8), 0, 0, 0), 2, 2**22, "gather"),
        (Link(Cost(0, 1e-8), Cost(0, 1e-8), Cost(0, 1e-8), 0, 0, 0), 8, 2**22, "shard"),
        # Fewer blocks than ranks: 8 x 16,384 elements would be one for each.
        (Link(Cost(0, 1e-8), Cost(0, 1e-8), Cost(0, 1e-8), 0, 0, 0), 8, 2**14, "gather"),
        # The second collective costs a second, the bytes do not matter.
        (Link(Cost(1, 1e-8), Cost(1, 1e-8), Cost(9, 1e-8), 0, 0, 0), 8, 2**22, "gather"),
        # The wire is free: packing is what costs.
        (Link(FREE, FREE, FREE, 1e-9, 1e-9, 1e-9), 8, 2**22, "bf16"),
    ],
)
def test_the_fastest_by_formula_is_taken(link, ranks, numel, name):
    assert _chosen(link, ranks, numel) == name


def test_times_are_bytes_over_the_link_and_passes_over_memory():
    link = Link(Cost(1.0, 2e-6), Cost(3.0, 4e-6), Cost(5.0, 6e-6), 7e-6, 8e-6, 9e-6)
    settings, numel = Settings(0.01, 1000, "fresh", torch.bfloat16), 4 * 16_384
    plan = Choice("auto", link).plan(("p",), (numel,), settings, 4)
    plans = {t.name: dataclasses.replace(plan, transport=t) for t in Choice.TRANSPORTS}
    seconds = {name: of.transport.seconds(of, link) for name, of in plans.items()}
    whole, ranged = plans["gather"].payload_bytes, plans["shard"].payload_bytes
    assert seconds["gather"] == pytest.approx(1 + 3 * whole * 2e-6 + numel * 15e-6)
    first, second = 3 + 3 * ranged * 4e-6, 1 + 3 * ranged * 2e-6
    assert seconds["shard"] == pytest.approx(first + second + 1.25 * numel * 15e-6)
    assert seconds["bf16"] == pytest.approx(5 + 1.5 * 2 * numel * 6e-6 + numel * 9e-6)


def _model(sizes=SIZES, link=MIXED, **options):
    model = DistributedDataParallel(Dictated(sizes), bucket_cap_mb=0.1)
    state = DCTState(model, **{"density": 0.05, "link": link} | options)
    model.register_comm_hook(state, dct_hook)
    return model, state


def _integers(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-60, 61, (n,), generator=generator).float() for n in SIZES]


def _step(model, grads):
    model.zero_grad()
    model(*grads).backward()
    return [parameter.grad.clone() for parameter in model.module.p]


def _mixed(rank):
    """The small bucket goes in bfloat16, the large one is compressed."""
    model, state = _model()
    applied, total = torch.zeros(SIZES[2]), torch.zeros(SIZES[2])
    with WireMeter() as meter:
        for step in range(6):
            meter.take()
            every = [_integers(step, r) for r in range(2)]
            means = _step(model, every[rank])
            exact = [(a + b) / 2 for a, b in zip(*every, strict=True)]  # in bfloat16, too
            assert torch.equal(means[0], exact[0]) and torch.equal(means[1], exact[1])
            assert torch.equal(means[2], exact[2]) == (step < 2)
            applied += means[2]
            total += every[rank][2]
        stats = state.stats()
        assert stats["wire_bytes"] == meter.take()
    assert 0.04 < stats["density"] < 0.0626  # of what is compressed
    left = owed(state.state_dict())["p.2"]
    dist.all_reduce(left)
    dist.all_reduce(total)
    assert torch.equal(2 * applied + left, total)
    assert {"p.2"} == set(state.parameter_stats())
    transports = re.search(r"transport: (.*) \(auto: ", state.plan())[1]
    assert sorted(transports.split(", ")) == ["bf16", "gather"], state.plan()
    saved = state.state_dict()
    state.close()
    # What a bucket owed before it was one that is not compressed comes with its next gradient.
    assert len(re.findall(r"^\d: .* -  +[\d,]+$", state.plan(), re.M)) == 1, state.plan()
    free = Link(Cost(1.0, 0.0), FREE, FREE, 0.0, 0.0, 0.0)
    model, state = _model(link=free)
    state.load_state_dict(saved)
    means = _step(model, [torch.zeros(n) for n in SIZES])
    torch.testing.assert_close(means[2], left / 2, rtol=2**-7, atol=0)
    assert torch.equal(means[2], gathered(means[2])[0])
    assert not any(value.any() for value in owed(state.state_dict()).values())


def test_buckets_of_one_model_go_different_ways():
    run_ranks(_mixed, 2)


def _empty(rank):
    """A bucket of an empty parameter alone."""
    sizes, always_bf16 = (0, 2000), Link(Cost(1.0, 0.0), FREE, FREE, 0.0, 0.0, 0.0)
    for options in ({"transport": "gather"}, {"transport": "shard"}, {"link": always_bf16}):
        model = DistributedDataParallel(Dictated(sizes), bucket_cap_mb=0.001)
        state = DCTState(model, density=1, start_step=0, **options)
        model.register_comm_hook(state, dct_hook)
        for _ in range(3):
            means = _step(model, [torch.ones(n) + rank for n in sizes])
            assert torch.equal(means[1], torch.full((2000,), 1.5)), options
        assert "buckets: 2" in state.plan()
        state.close()


def test_an_empty_parameter_may_have_a_bucket_of_its_own():
    run_ranks(_empty, 2)


def _skipped(rank):
    """An overflow in the bucket that is not compressed takes back what the other one sent."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    model, state = _model(grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total = torch.zeros(SIZES[2])
    for step in range(8):
        grads = _integers(step, rank)
        total += grads[2]
        before = weights(model)
        if step == 5 and rank == 0:
            grads[0][3] = torch.inf
        optimizer.zero_grad()
        scaler.scale(model(*grads)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weights(model), before) == (step == 5)
    left = owed(state.state_dict())["p.2"]
    dist.all_reduce(left)
    dist.all_reduce(total)
    assert torch.equal(left - 2 * model.module.p[2].detach(), total)
    return scaler.get_scale()


def test_a_skipped_step_is_taken_back_wherever_it_overflowed():
    assert run_ranks(_skipped, 2) == [32.0, 32.0]


def _damaged(rank):
    """Damage is told beside a bucket that carries no word of it."""
    model, _ = _model()
    all_gather, step = gather.all_gather, 0

    def in_flight(output, *args):
        all_gather(output, *args)
        if step == 4 and rank == 0:
            output[1, 0] ^= 0xFF

    gather.all_gather = in_flight
    for step in range(5):
        _step(model, _integers(step, rank))
    if rank == 1:
        _step(model, _integers(5, rank))
    text = "status 1 from rank 1" if rank == 0 else "damage that rank 0 received"
    with pytest.raises(RuntimeError, match=text):
        _step(model, _integers(6, rank))
    gathered(torch.ones(1))


def test_damage_is_told_beside_buckets_that_are_not_compressed():
    run_ranks(_damaged, 2)


def _probed(rank):
    drawn = torch.get_rng_state()
    model, state = _model(link="probe")
    assert torch.equal(torch.get_rng_state(), drawn)
    for step in range(4):
        _step(model, _integers(step, rank))
    link = state._choice._link
    assert all(cost.fixed >= 0 and cost.per_byte >= 0 for cost in link[:3])
    assert min(link[3:]) > 0 and max(link[3:]) < 1e-5
    assert "ms by its formulas; gather" in state.plan()
    state.load_state_dict(state.state_dict())
    assert "owner_residual" in entry(state.state_dict())["parameters"]["p.0"]
    return list(link)


def test_a_probe_measures_one_link_for_all_ranks():
    first, second = run_ranks(_probed, 2)
    assert first == second


def _file_of_one(rank, path):
    """The first rank reads it, as a bench writes it on one machine."""
    _, state = _model(link=path if rank == 0 else path.with_name("nothing"))
    state.close()
    with pytest.raises(ValueError, match="link must be 'probe' or a JSON file, got "):
        _model(link=path if rank == 1 else path.with_name("nothing"))
    text = "link must be the same on every rank, got given on rank 0, probe on rank 1"
    with pytest.raises(ValueError, match=text):
        _model(link=path if rank == 0 else "probe")
    return list(state._choice._link)


def test_the_first_ranks_file_is_everybodys(tmp_path):
    path = tmp_path / "link.json"
    path.write_text(json.dumps(_of_bench(2)))
    first, second = run_ranks(_file_of_one, 2, path)
    assert first == second


def _of_bench(ranks):
    """What dct-bench link writes, as far as it is read."""

    def cell(mode, wire, nbytes):
        phases = {"compute": 5.0, "pack": 2.0, "wire": wire, "unpack": 1.0}
        cell = {
            "ranks": ranks,
            "rate": 1e9,
            "mode": mode,
            "step_ms": [1, 2, 3],
            "phases_ms": phases,
        }
        return cell | {"payload_bytes": nbytes}

    return {
        "model": {"parameters": 1000},
        "links": [{"ranks": ranks, "rate": 1e9, "bits_per_second": 8e6, "latency_us": 9.0}],
        "cells": [cell("bf16", 3.0, 2000), cell("dct", 1.5, 500), cell("dct-shard", 2.5, 1000)],
    }


def test_a_link_is_read_from_the_benchs_file(tmp_path):
    path, content = tmp_path / "link.json", _of_bench(4)
    path.write_text(json.dumps(content))
    link = read(path, 4)
    assert link.all_gather == pytest.approx((1e-3, 1e-6))  # 1.5 ms, of them 0.5 for bytes
    assert link.all_to_all == pytest.approx((0.5e-3, 1e-6))
    assert link.all_reduce == pytest.approx((1e-3, 1e-6))
    assert link[3:] == pytest.approx((2e-6, 1e-6, 3e-6))
    with pytest.raises(ValueError, match="link must be of dct-bench link --ranks 2, one rate"):
        read(path, 2)
    with pytest.raises(ValueError, match=r"link must be 'probe' or a JSON file, got .*other\.json"):
        read(tmp_path / "other.json", 4)
    for other in ([], {"links": [{}]}, content | {"cells": [1]}, content | {"model": None}):
        path.write_text(json.dumps(other))
        with pytest.raises(ValueError, match="link must be of dct-bench link --ranks 4, one rate"):
            read(path, 4)
    content["cells"].pop()
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"modes bf16, dct, dct-shard, got .*link\.json"):
        read(path, 4)


def test_a_link_is_for_auto_alone():
    with pytest.raises(ValueError, match="link must be None with transport 'shard', got 'probe'"):
        DCTState(transport="shard", link="probe")
    with pytest.raises(TypeError, match="link must be a Link, 'probe' or a path, got int"):
        DCTState(link=1)
