"""The process group "dct": results against a float32 oracle, and which tensors are compressed."""

import logging
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import payload
from oracle import quantized_payload as oracle
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as functional

from dct_parallel import process_group
from dct_parallel.collectives import all_gather, reduce_scatter
from support.ranks import assert_same, on_ranks, run_ranks
from wire_meter import WireMeter

BLOCK = 16_384
NUMEL = 2 * BLOCK + 1000  # each of three ranks owns one block; the last is short
ODD = 3001  # a part that is no multiple of any block, row or group


def newer(module, name, old):
    """The function `name` of a module, which is called `old` before torch 2.13."""
    return getattr(module, name) if hasattr(module, name) else getattr(module, old)


def new_group(**options):
    """A group of all ranks with these settings of `configure`."""
    process_group.configure(**{"min_bytes": 4000} | options)
    return dist.new_group(backend="dct")


def grads(numel, dtype=torch.float32):
    """A tensor of every rank, with different magnitudes."""
    generator = torch.Generator().manual_seed(0)
    ranks = range(dist.get_world_size())
    return [(torch.randn(numel, generator=generator) * 10.0**r).to(dtype) for r in ranks]


def rounded(tensor, format):
    """The float32 values that a message contains."""
    return oracle.encode(tensor.float().numpy(), format)[1]


def summed(tensors, format, factor):
    total = sum((rounded(tensor, format) for tensor in tensors), np.float32(0))
    return torch.from_numpy(np.float32(factor) * total)


def reduced(tensors, format, op):
    """The all-reduce of these tensors, in float32: one rounding on 2 ranks, two on 3 ranks."""
    ranks = len(tensors)
    factor = ranks if op == ReduceOp.SUM else 1
    if ranks == 2:
        return summed(tensors, format, np.float32(1 / ranks) * np.float32(factor))
    bounds = [payload.bounds(tensors[0].numel(), ranks, owner) for owner in range(ranks)]
    means = [summed([t[low:high] for t in tensors], format, 1 / ranks) for low, high in bounds]
    return torch.cat([torch.from_numpy(np.float32(factor) * rounded(m, format)) for m in means])


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_reductions_equal_the_oracle(rank):
    """Results have the bits of the oracle's float32 result, rounded once to the dtype."""
    ranks = dist.get_world_size()
    scatter = newer(dist, "reduce_scatter_single", "reduce_scatter_tensor")
    for format in process_group.FORMATS:
        group = new_group(format=format)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                xs = grads(NUMEL, dtype)
                work = dist.all_reduce(x := xs[rank].clone(), op, group, async_op=True)
                assert work.wait() and work.is_completed() and work.is_success()
                assert torch.equal(x, reduced(xs, format, op).to(dtype))
                assert work.get_future().value()[0] is x
                # The parts of a reduce-scatter need not be whole blocks.
                xs, factor = grads(ranks * ODD, dtype), 1.0 if op == ReduceOp.SUM else 1 / ranks
                parts = [x.view(ranks, ODD)[rank] for x in xs]
                expected = summed(parts, format, factor).to(dtype)
                out = torch.empty(3, ODD, dtype=dtype)
                dist.reduce_scatter(out[0], [*xs[rank].clone().chunk(ranks)], op, group)
                out[1] = newer(functional, "reduce_scatter_single", "reduce_scatter_tensor")(
                    xs[rank], ("sum", "avg")[op == ReduceOp.AVG], 0, group
                )
                with dist._coalescing_manager(group, async_ops=True) as coalesced:
                    small = torch.empty(1, dtype=dtype)
                    scatter(out[2], xs[rank], op, group)
                    scatter(small, torch.ones(ranks, dtype=dtype), op, group)
                coalesced.wait()
                assert all(torch.equal(row, expected) for row in out)
                assert small == (ranks if op == ReduceOp.SUM else 1)
    sent = process_group.stats()
    assert sent["all_reduce"]["calls"] == 18 and sent["reduce_scatter"]["calls"] == 54


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_gathers_are_exact_unless_configured(rank):
    ranks = dist.get_world_size()
    for gathers in (None, "int8"):
        group, xs = new_group(gathers=gathers), grads(ODD)
        x = xs[rank].clone()
        expected = [torch.from_numpy(rounded(x, "int8")) for x in xs] if gathers else xs
        dist.all_gather(listed := [torch.empty(ODD) for _ in xs], x, group)
        all_gather(flat := torch.empty(ranks * ODD), x, group)
        many = newer(functional, "all_gather_single", "all_gather_tensor")(x, 0, group)
        for found in (torch.cat(listed), flat, many):
            assert torch.equal(found, torch.cat(expected))
        assert process_group.stats().get("all_gather", {"calls": 0})["calls"] == 3 * bool(gathers)


@on_ranks(2)
def test_everything_else_is_sent_unchanged(rank):
    """Each tensor here would lose bits in int4."""
    group = new_group(format="int4", gathers=None)
    x, x64 = torch.linspace(0, 1, 4096), torch.linspace(0, 1, 4096, dtype=torch.float64)
    for tensor, op, expected in (
        (x[:999], ReduceOp.SUM, 2 * x[:999]),  # 3,996 bytes
        (x64, ReduceOp.SUM, 2 * x64),
        (torch.arange(4096), ReduceOp.SUM, 2 * torch.arange(4096)),
        (x, ReduceOp.MAX, x),
        (x, ReduceOp.MIN, x),
    ):
        dist.all_reduce(tensor := tensor.clone(), op, group)
        assert torch.equal(tensor, expected)
    with process_group.exact():
        with process_group.exact():
            pass
        dist.all_reduce(y := x.clone(), group=group)
        reduce_scatter(z := torch.empty(2048), x, group)
    assert torch.equal(y, 2 * x) and torch.equal(z, (2 * x).view(2, -1)[rank])
    dist.broadcast(y := x * (rank + 1), 0, group)
    assert torch.equal(y, x)
    y.zero_()
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank}, group)
    assert found == [{"rank": 0}, {"rank": 1}]
    ops = [dist.P2POp(dist.isend, x, 1 - rank, group), dist.P2POp(dist.irecv, y, 1 - rank, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(y, x)
    dist.barrier(group)
    dist.all_to_all_single(y := torch.empty(4096), x, group=group)
    assert torch.equal(y, x.view(2, -1)[rank].repeat(2))
    assert process_group.stats() == {}
    y = x.clone()
    if rank == 0:
        y[70] = math.nan  # arrives in a whole group of 64 entries
    dist.all_reduce(y, group=group)
    assert y[64:128].isnan().all() and y.isnan().sum() == 64


@on_ranks(2)
def test_coalesced_calls_compress_large_tensors_only(rank):
    group, given = new_group(format="int4"), [torch.linspace(0, 1, n) for n in (4096, 3, 2000)]
    with pytest.raises(RuntimeError, match="startCoalescing"):  # gloo has none; nothing changes
        group._start_coalescing(torch.device("cpu"))
    with dist._coalescing_manager(group, async_ops=True) as coalesced:
        for tensor in (tensors := [x.clone() for x in given]):
            dist.all_reduce(tensor, group=group)
    coalesced.wait()
    sums = [reduced([x, x], "int4", ReduceOp.SUM) if len(x) > 3 else 2 * x for x in given]
    assert all(map(torch.equal, tensors, sums))
    assert process_group.stats()["all_reduce"]["calls"] == 2


@on_ranks(2)
def test_stats_count_bytes(rank):
    """Messages of 32,768 float32 elements: 64 bytes, then 1,056 bytes per 1,024 elements."""
    group, message = new_group(), 64 + 32 * 1056
    dist.all_reduce(torch.ones(32_768), group=group)
    figures = {"calls": 1, "dense_bytes": 4 * 32_768, "sent_bytes": message}
    assert process_group.stats() == {"all_reduce": figures}
    reduce_scatter(torch.empty(32_768, dtype=torch.bfloat16), torch.ones(65_536).bfloat16(), group)
    figures = {"calls": 1, "dense_bytes": 2 * 32_768, "sent_bytes": message}
    assert process_group.stats()["reduce_scatter"] == figures
    with WireMeter(group._inner) as meter:
        dist.all_reduce(torch.ones(32_768), group=group)
        assert meter.take() == message
        dist.all_reduce(torch.ones(1), group=group)  # in no group below
        assert meter.take() == 0
    assert 2 * 32_768 / message > 1.9 and 4 * 32_768 / message > 3.8


@on_ranks(4)
def test_groups_say_which_ranks_compress(rank):
    """Without `groups`, only groups of all ranks compress. Others are logged."""
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("dct").addHandler(handler)
    logging.getLogger("dct").setLevel(logging.INFO)
    x = torch.linspace(0, 1, 4096)

    def compresses(group):
        dist.all_reduce(y := x.clone(), group=group)
        return not torch.equal(y, group.size() * x)

    def made(groups):
        process_group.configure(format="int4", min_bytes=1, groups=groups)
        pairs = [dist.new_group(pair, backend="dct") for pair in ([0, 1], [2, 3])]
        return [dist.new_group(backend="dct"), pairs[rank // 2]]

    assert list(map(compresses, made(None))) == [True, False]
    pair = [0, 1] if rank < 2 else [2, 3]
    assert len(logged) == 2 and f"ranks {pair} compresses nothing" in logged[0]
    assert "ranks [0, 1, 2, 3] compresses collectives of at least 1 bytes in int4" in logged[1]
    assert list(map(compresses, made(lambda ranks: ranks == (2, 3)))) == [False, rank > 1]


@on_ranks(3)
def test_calls_run_in_the_order_of_issue(rank):
    """Ranks wait in different orders, and send dense tensors between compressed ones."""
    group, generator = new_group(format="bfloat16"), torch.Generator().manual_seed(rank)
    for _ in range(10):
        xs = [torch.full((n,), float(n % 7)) for i in range(4) for n in (NUMEL - i, 1)]
        sums = [3 * x for x in xs]
        works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
        for index in torch.randperm(len(works), generator=generator).tolist():
            works[index].wait()
        assert all(map(torch.equal, xs, sums))


@on_ranks(2)
def test_many_short_calls_do_not_hang(rank):
    """torch runs methods that Python does not override while it holds the GIL (2.14: all these)."""
    group = new_group()
    one, two = torch.ones(1), [torch.ones(1), torch.ones(1)]
    empty = [torch.empty(1), torch.empty(1)]
    for call in (
        lambda: dist.broadcast(one, 0, group),
        lambda: dist.reduce(one, 0, group=group),
        lambda: dist.gather(one, None if rank else empty, 0, group),
        lambda: dist.scatter(one, two if rank == 0 else None, 0, group),
        lambda: dist.all_to_all(empty, two, group),
        lambda: dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group),
        lambda: dist.recv(one, group=group) if rank else dist.send(one, 1, group),
        lambda: dist.barrier(group),
    ):
        for _ in range(1000):
            call()


def _default_group(rank):
    """The default group, with default settings, and groups that inherit its backend."""
    assert dist.get_backend() == "dct" == dist.group.WORLD.name()
    x = torch.linspace(0, 1, 2**18 + 1)
    for numel, calls in ((2**18 - 1, 0), (2**18, 1)):  # 1 MiB
        dist.all_reduce(x[:numel].clone())
        assert process_group.stats().get("all_reduce", {"calls": 0})["calls"] == calls
    inherits = dist.new_group([0, 1])
    for group in (inherits, dist.init_device_mesh("cpu", (2,)).get_group()):
        dist.all_reduce(y := x.clone(), group=group)
        assert_same(y)
        assert 0 < (y - 2 * x).abs().max() < 0.01
    dist.destroy_process_group(inherits)
    dist.all_gather_object(found := [None, None], rank)
    assert found == [0, 1]


def test_default_group():
    run_ranks(_default_group, 2, backend="dct")
