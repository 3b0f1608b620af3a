"""Every entry in few bits: what a payload holds, what waits, and what a reader makes of damage."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_kernels import payload_info, row_dequantize, row_quantize
from dct_kernels.row_layout import row_bytes
from dct_parallel import DCTAverager, DCTState, dct_fully_shard_hook
from dct_parallel.exchange.quantized import FORMATS, ROW, QuantizedRows, payload_bytes
from nodes import TRANSPORTS, meshed_model, owed_by_all, same_step
from ranks import assert_same, batch, entry, hooked, mlp, on_ranks, weights
from wire_meter import WireMeter

CPU = torch.device("cpu")
BLOCK = 16_384
NUMELS = (0, 1, 1023, 1024, 1025, BLOCK - 1, BLOCK, BLOCK + 1, 50_000)


def _numbers(numel, seed=0):
    """Of very different sizes, from row to row and within one."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 4, (numel // ROW + 1,), generator=generator)
    x = torch.randn(numel, generator=generator) * sizes.repeat_interleave(ROW)[:numel]
    return x * 2.0 ** torch.randint(-12, 3, (numel,), generator=generator)


def _sent(codec):
    out = torch.empty_like(codec.residual)
    assert not codec.unpack(codec.payload.unsqueeze(0), out).any()
    return out


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("numel", NUMELS)
def test_what_was_sent_and_what_is_left_is_all_there_was(format, numel):
    codec = QuantizedRows(numel, format, 1, None, CPU)
    for step in range(4):
        grad, before = _numbers(numel, step), codec.residual.clone()
        payload = codec.pack(grad)
        acc = (before + grad).double()
        assert payload.numel() == payload_bytes(numel, format)
        info = payload_info(payload)
        assert (info.value_dtype, info.numel, info.count) == (format, numel, numel)
        sent, left = _sent(codec).double(), codec.residual.double()
        if format == "ternary":  # one rounding of what is left
            assert (sent + left - acc).abs().le(2.0**-24 * left.abs() + 1e-45).all()
        else:
            assert torch.equal(sent + left, acc)
        # An oracle of its own: rows of 1,024 of the accumulated, the last one filled with zeros.
        rows = torch.nn.functional.pad(before + grad, (0, -numel % ROW)).view(-1, ROW)
        expected = row_dequantize(row_quantize(rows, format), ROW, format, torch.float32)
        assert torch.equal(sent.float(), expected.flatten()[:numel])


@pytest.mark.parametrize("format", FORMATS)
def test_ranges_are_payloads_of_their_own(format):
    """Three ranges of 2, 2 and 1 blocks: as three tensors, of which the last is short."""
    numel, bounds = 4 * BLOCK + 700, (0, 2 * BLOCK, 4 * BLOCK, 4 * BLOCK + 700)
    whole = QuantizedRows(numel, format, 3, None, CPU)
    grad = _numbers(numel)
    whole.pack(grad)
    out = torch.empty(numel)
    assert not whole.unpack(whole.payload.unsqueeze(0), out).any()
    for r, (low, high) in enumerate(itertools.pairwise(bounds)):
        own = QuantizedRows(high - low, format, 1, 2 * BLOCK, CPU)
        assert torch.equal(own.pack(grad[low:high]), whole.payload[r])
        assert torch.equal(own.residual, whole.residual[low:high])
        assert torch.equal(_sent(own), out[low:high])


@pytest.mark.parametrize("format", FORMATS)
def test_the_mean_is_summed_in_rank_order(format):
    ranks = [QuantizedRows(3000, format, 1, None, CPU) for _ in range(3)]
    payloads = torch.stack([c.pack(_numbers(3000, r)) for r, c in enumerate(ranks)])
    scale, total = torch.tensor([4.0]), torch.zeros(3000)
    for codec in ranks:
        total = total + _sent(codec)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(3000, dtype=dtype)
        assert not ranks[0].unpack(payloads, out, scale).any()
        third = torch.tensor(1 / 3, dtype=torch.float32)
        assert torch.equal(out, (total * (third * scale)).to(dtype))


def test_gradients_are_unscaled_first():
    x, scale = _numbers(2000), torch.tensor([1 / 1024])
    plain, scaled = (QuantizedRows(2000, "int4", 1, None, CPU) for _ in range(2))
    plain.pack(x)
    scaled.pack(x * 1024, scale)
    assert torch.equal(plain.payload, scaled.payload)
    half, whole = (QuantizedRows(2000, "int8", 1, None, CPU) for _ in range(2))
    half.pack(x.bfloat16(), scale)
    whole.pack(x.bfloat16().float(), scale)
    assert torch.equal(half.payload, whole.payload)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_keeps_its_residual_and_says_so(bad):
    codec = QuantizedRows(BLOCK * 2, "int4", 2, None, CPU)
    codec.pack(_numbers(BLOCK * 2))
    before, grad = codec.residual.clone(), _numbers(BLOCK * 2, 1)
    acc = before + grad
    grad[BLOCK + 5] = bad
    codec.pack(grad)
    first, second = map(payload_info, codec.payload)
    assert not first.non_finite and second.non_finite
    out = torch.empty(BLOCK * 2)
    codec.unpack(codec.payload.unsqueeze(0), out)
    row = slice(BLOCK, BLOCK + ROW)
    assert out[row].isnan().all() and out.isnan().sum() == ROW
    assert torch.equal(codec.residual[row], before[row])
    rest = torch.ones(BLOCK * 2, dtype=torch.bool)
    rest[row] = False
    assert torch.equal((codec.residual + out)[rest], acc[rest])
    codec.take_back()
    assert torch.equal(codec.residual[rest], acc[rest])
    assert torch.equal(codec.residual[row], before[row])
    again = codec.residual.clone()
    codec.take_back()
    assert torch.equal(codec.residual, again)


def test_damage():
    """A wrong header adds nothing, and is a status; rows can be any bytes."""
    codec = QuantizedRows(3000, "int4", 1, None, CPU)
    good = codec.pack(_numbers(3000)).clone()
    for byte in range(64):
        payload = good.clone()
        payload[byte] ^= 1
        out = torch.empty(3000)
        assert codec.unpack(torch.stack([good, payload]), out).tolist() == [0, 1], byte
        alone = torch.empty(3000)
        codec.unpack(torch.stack([good, good]), alone)
        assert torch.equal(out, alone / 2)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, good.shape, generator=generator, dtype=torch.uint8)
    noise[:64] = good[:64]
    assert codec.unpack(noise.unsqueeze(0), torch.empty(3000)).tolist() == [0]


SIZES = (40_000, 100, 30_001)


@pytest.mark.parametrize(
    "ranks, transport, local_size, format",
    [(2, transport, None, format) for transport in TRANSPORTS for format in FORMATS]
    + [(4, "reduce_scatter", 2, "int4")],
)
@on_ranks("ranks")
def test_hooks_and_nodes_lose_nothing(rank, transport, local_size, format):
    model, state = meshed_model(SIZES, local_size, transport=transport, density=1, format=format)
    applied, total = torch.zeros(sum(SIZES)).double(), torch.zeros(sum(SIZES)).double()
    for step in range(6):
        grads = _numbers(sum(SIZES), 10 * step + rank).split(SIZES)
        mean = same_step(model, grads)
        if step >= 2:  # before, bfloat16 rounds
            applied += mean
            total += torch.cat(grads)
    left = owed_by_all(state.state_dict())
    dist.all_reduce(total)
    error = (applied + left - total / dist.get_world_size()).abs()
    largest = torch.stack([p.abs().max() for p in total.split(ROW)]).repeat_interleave(ROW)
    # Means are rounded once a step, and what crosses inside a node once more.
    assert (error <= 1e-6 * largest[: len(error)] + 1e-12).all()
    stats = state.stats()
    assert stats["density"] == 1 and stats["overflow"] == 0
    plan = state.plan()
    assert f"{format} values" in plan and "Capacity" not in plan


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_run_goes_on_bit_for_bit(rank, transport):
    """A state goes on bit for bit."""

    def make():
        return meshed_model(SIZES, None, transport=transport, density=1, format="int4")

    model, state = make()
    for step in range(4):
        same_step(model, _numbers(sum(SIZES), 10 * step + rank).split(SIZES))
    saved, kept = state.state_dict(), weights(model)
    other, fresh = make()
    same_step(other, torch.zeros(sum(SIZES)).split(SIZES))  # DDP has its buckets then
    fresh.load_state_dict(saved)
    assert torch.equal(kept, weights(model))
    for step in range(4, 7):
        grads = _numbers(sum(SIZES), 10 * step + rank).split(SIZES)
        assert torch.equal(same_step(model, grads), same_step(other, grads)), step


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks("ranks")
def test_bytes(rank):
    sizes = [1 << 20]
    for format, factor in (("int8", 3.98), ("int4", 7.93), ("ternary", 19.6)):
        model, state = meshed_model(sizes, None, density=1, format=format, start_step=0)
        model(torch.randn(1 << 20)).backward()
        with WireMeter() as meter:
            model(torch.randn(1 << 20)).backward()
            sent = meter.take()
        assert sent == state.stats()["wire_bytes"]
        ranks = dist.get_world_size()
        dense = 8 * (ranks - 1) / ranks * (1 << 20)
        assert dense / sent > factor, (format, dense / sent)
        expected = 64 + (1 << 10) * row_bytes(ROW, format)
        if ranks == 2:
            assert sent == math.ceil(expected / 16) * 16
        assert ("reduce_scatter" in state.plan()) == (ranks > 2)
        state.close()


@pytest.mark.parametrize("format", FORMATS)
@on_ranks(2)
def test_a_model_learns(rank, format):
    torch.manual_seed(0)
    model, _ = hooked(DDP(torch.nn.Linear(64, 64)), density=1, format=format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(300):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
    assert_same(weights(model))
    assert loss.item() < 0.01


@on_ranks(2)
def test_local_steps_lose_nothing(rank):
    """Local steps: what all have moved by is in the base, or waits."""
    model = nn.ParameterList([torch.zeros(40_000), torch.zeros(100)])
    averager = DCTAverager(model, density=1, period=2, format="int4")
    moved = torch.zeros(40_100).double()
    for step in range(8):
        move = _numbers(40_100, 10 * step + rank)
        before = weights(model)
        with torch.no_grad():
            for parameter, part in zip(model, move.split([40_000, 100]), strict=True):
                parameter += part
        moved += weights(model).double() - before.double()
        averager.average_parameters()
    assert_same(weights(model))
    saved = entry(averager.state_dict())["parameters"]
    left = torch.cat([saved[name]["residual"] for name in ("0", "1")]).double()
    assert left.count_nonzero() > 30_000
    for total in (moved, left):
        dist.all_reduce(total)
    error = (weights(model) + (left - moved) / dist.get_world_size()).abs()
    largest = torch.stack([part.abs().max() for part in moved.split(ROW)]).repeat_interleave(ROW)
    assert (error <= 1e-6 * largest[:40_100]).all()


@on_ranks(4)
def test_replicas_of_shards_have_the_dense_sum_but_for_what_waits(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sums = []
    for format in (torch.float32, "int4"):
        model = fully_shard(mlp(), mesh=mesh["shard"])
        state = dct_fully_shard_hook(model, mesh=mesh, density=1, format=format, start_step=0)
        for step in range(20):  # gradients add up
            x, y = batch(step, rank)
            (model(x) - y).square().mean().backward()
        sums.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
        state.close()
    dense, rows = sums
    assert_same(rows)
    error = (rows - dense).abs().max() / dense.abs().max()
    assert 0 < error < 0.02  # a seventh of a step's largest entry may wait


def test_it_is_for_every_entry():
    rule = "dct::DCTState: density must be 1 with format int4, which sends every entry, got"
    with pytest.raises(ValueError, match=f"{rule} 0.005"):
        DCTState(density=0.005, format="int4")
    assert DCTState(format="int4").settings == DCTState(density=1, format="int4").settings
