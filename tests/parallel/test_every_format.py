"""Every format at every entry point with both transports, on the same numbers.

`tests/oracle` computes bitwise equal results for all ranks in one process. Rounding errors of the
formats are pending. All ranks have equal results. Byte counts match the formula and `plan()`.
"""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import floats
from oracle import quantized_payload as payloads
from torch.distributed.device_mesh import init_device_mesh

from dct_embeddings import ReplicaSync, ShardedEmbeddingBags, plan_shards
from dct_parallel import all_reduce_compressed
from support.entry_points import Hook, LocalSteps, NodeMesh, Sharded
from support.nodes import TRANSPORTS
from support.ranks import assert_same, gathered, on_ranks
from wire_meter import WireMeter

NUMEL, WIDTH, STEPS = 35 * 1024, 512, 2  # 3 blocks, or 2 per half of it; the last is short


def _numbers(step, rank):
    """Return numbers whose magnitudes vary widely between and within rows."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    sizes = 10.0 ** torch.randint(-3, 3, (NUMEL // 1024,), generator=generator).float()
    x = torch.randn(NUMEL, generator=generator) * sizes.repeat_interleave(1024)
    x *= 2.0 ** torch.randint(-8, 3, (NUMEL,), generator=generator).float()
    return x * (torch.arange(NUMEL) // 64 % 8 == 0)  # the oracle is fast for zeros


class _Exchange:
    """Simulates all ranks of one exchange."""

    def __init__(self, numel, ranks, format, transport):
        self._by_owners = transport == "reduce_scatter"
        self._geometry = payloads.Geometry(numel, format, ranks if self._by_owners else 1)
        self.residuals = np.zeros((ranks, numel), np.float32)
        self.owned = np.zeros(numel, np.float32)

    @property
    def nbytes(self):
        """Return the bytes that a rank sends if every rank owns a range."""
        times = 2 if self._by_owners else 1
        return times * (len(self.residuals) - 1) * self._geometry.nbytes

    def mean(self, grads, times=1):
        """Return `times` the mean."""
        geometry, share, sent = self._geometry, times / len(grads), []
        for residual, grad in zip(self.residuals, grads, strict=True):
            rows = [bytearray(geometry.nbytes) for _ in range(geometry.ranges)]
            residual[:] = payloads.quantize_pack(residual, grad.numpy(), rows, geometry)
            sent.append(rows)
        if self._by_owners:
            results, payloads_by_rank, share = [], sent, float(times)
            for owner in range(geometry.ranges):
                low, high = geometry.bounds(owner)
                owner_geometry = payloads.Geometry(high - low, geometry.format)
                results.append(bytearray(geometry.nbytes))
                self.owned[low:high], _ = payloads.pack_mean(
                    [rows[owner] for rows in payloads_by_rank],
                    self.owned[low:high],
                    results[-1],
                    owner_geometry,
                )
            sent = [results]
        bits, status = payloads.dequantize_sum(sent, geometry, "float32", share)
        assert not status.any()
        return torch.from_numpy(floats.widen(bits, "float32"))

    def merge_owned(self):
        """Add the residual of each owner, in units of the sum, to the owner's own residual."""
        for rank, residual in enumerate(self.residuals if self._by_owners else ()):
            part = slice(*self._geometry.bounds(rank))
            residual[part] += np.float32(len(self.residuals)) * self.owned[part]
        self.owned[:] = 0


class _Oracle:
    """Simulates all ranks of an entry point, including a dense reduction inside nodes."""

    def __init__(self, point, format, transport):
        self._local = point.local_size or 1
        ranks = dist.get_world_size() // self._local
        length = NUMEL // self._local
        self._exchanges = [_Exchange(length, ranks, format, transport) for _ in range(self._local)]
        self._base = torch.zeros(NUMEL) if isinstance(point, LocalSteps) else None
        self.nbytes = self._exchanges[0].nbytes

    def result(self, grads):
        if self._base is not None:  # numbers are changes, and results are the new base
            moved = [self._base + grad - self._base for grad in grads]
            self._base += self._exchanges[0].mean(moved)
            return self._base
        size = self._local
        nodes = [sum(g / size for g in grads[i : i + size]) for i in range(0, len(grads), size)]
        parts = zip(*(node.split(NUMEL // size) for node in nodes), strict=True)
        return torch.cat([e.mean(p) for e, p in zip(self._exchanges, parts, strict=True)])


class _Tables(LocalSteps):
    """Replicas of a table in which every row changes."""

    def __init__(self, sizes, start_step=0, **settings):  # start_step unused
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        rows = [NUMEL // WIDTH]
        self.bags = ShardedEmbeddingBags([torch.zeros(rows[0], WIDTH)], plan_shards(rows, 1), mesh)
        self.optimizer = torch.optim.SGD([self.bags.weight], lr=1)
        self.state = ReplicaSync(self.bags, optimizer=self.optimizer, **settings)
        self.group = mesh.get_group("replicate")

    def step(self, numbers):
        self.bags.weight.grad = -numbers.view(-1, WIDTH)
        self.optimizer.step()
        self.state.step()
        self.applied = self.weights().double()
        return self.weights()

    def weights(self):
        return self.bags.weight.detach().flatten().clone()

    def pending(self):
        return sum(gathered(self.state._average.residual.flatten().double())) / 2


class _OracleOfTables:
    """Simulates `_Tables`. Each sync is a new exchange, and pending changes are kept per row."""

    def __init__(self, format, transport):
        self._settings, self._pending = (NUMEL, 2, format, transport), torch.zeros(2, NUMEL)
        self._base, self.nbytes = torch.zeros(NUMEL), _Exchange(*self._settings).nbytes

    def result(self, grads):
        once = _Exchange(*self._settings)
        pairs = zip(self._pending, grads, strict=True)
        self._base += once.mean([left + (self._base + g - self._base) for left, g in pairs])
        once.merge_owned()
        self._pending = torch.from_numpy(once.residuals)
        return self._base


def _extra_bytes(make):
    """Return the bytes of the flag for finite weights, or of the list of changed rows."""
    ranks = dist.get_world_size()
    if make is _Tables:
        return 8 + 4 * (NUMEL // WIDTH)
    return 2 * (ranks - 1) * 8 // ranks if make is LocalSteps else 0


def _check(make, rank):
    ranks = dist.get_world_size()
    steps = [[_numbers(step, r) for r in range(ranks)] for step in range(STEPS)]
    # float32 rounding errors are bounded relative to the row's largest sum of magnitudes.
    largest = sum(numbers.abs() for grads in steps for numbers in grads).view(-1, 1024)
    largest = largest.amax(1).repeat_interleave(1024)
    total = sum(numbers.double() for grads in steps for numbers in grads) / ranks
    for format, transport in itertools.product(payloads.FORMATS, TRANSPORTS):
        case, settings = (format, transport), {"format": format, "transport": transport}
        point = make([NUMEL], density=1, start_step=0, **settings)
        oracle = _OracleOfTables(*case) if make is _Tables else _Oracle(point, *case)
        for step, grads in enumerate(steps):
            with WireMeter(point.group) as meter:
                got = point.step(grads[rank])
                sent = meter.take()
            assert_same(got)
            if rank == 0:
                assert torch.equal(got, oracle.result(grads)), (case, step)
        left = point.pending()
        assert bool(left.any()) == (format != "float32"), case
        assert ((point.applied + left - total).abs() <= 1e-6 * largest).all(), case
        assert sent == oracle.nbytes + _extra_bytes(make), case
        if make is _Tables:
            point.state.flush()
            assert_same(point.weights())
            assert ((point.weights() - total).abs() <= 1e-6 * largest).all(), case
            continue
        stats, plan = point.state.stats(), point.state.plan()
        reported = [stats[key] for key in ("density", "overflow", "wire_bytes")]
        assert reported == [1, 0, oracle.nbytes], case
        assert f"{oracle.nbytes:,}" in plan and f"{format} values" in plan
        assert "Capacity" not in plan


@on_ranks(3)
def test_ddp(rank):
    _check(Hook, rank)


@on_ranks(4)
def test_ddp_on_nodes(rank):
    _check(NodeMesh, rank)


@on_ranks(4)
def test_fsdp2(rank):
    _check(Sharded, rank)


@on_ranks(2)
def test_local_steps(rank):
    _check(LocalSteps, rank)


@on_ranks(2)
def test_replicas_of_tables(rank):
    _check(_Tables, rank)


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_all_reduce(rank, ranks):
    """Two ranks use an all-gather, and three ranks a reduce-scatter."""
    for format in payloads.FORMATS:
        oracle = _Exchange(NUMEL, ranks, format, TRANSPORTS[ranks > 2])
        residual = torch.zeros(NUMEL)
        for step in range(STEPS):
            grads = [_numbers(step, r) for r in range(ranks)]
            with WireMeter() as meter:
                all_reduce_compressed(x := grads[rank].clone(), residual, format=format)
                assert meter.take() == oracle.nbytes, format
            assert torch.equal(x, oracle.mean(grads, times=ranks)), (format, step)
            oracle.merge_owned()
            assert torch.equal(residual, torch.from_numpy(oracle.residuals[rank])), (format, step)
