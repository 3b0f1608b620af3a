"""Every format at every door, by both transports, each asked the same of the same numbers.

The results of a door are, to the bit, what `tests/oracle` makes of all ranks' numbers in one
process; what they leave out waits; ranks have equal bits; a state goes on bit for bit; and what is
sent is what the formula and `plan()` say.
"""

import copy
import itertools

import numpy as np
import torch
import torch.distributed as dist
from oracle import floats
from oracle import quantized_payload as payloads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dct_embeddings import ReplicaSync, ShardedEmbeddingBags, plan_shards
from dct_parallel import DCTAverager, dct_fully_shard_hook
from nodes import TRANSPORTS, meshed_model, owed_by_all
from ranks import Dictated, assert_same, gathered, on_ranks, owed, shard_mesh, weights
from wire_meter import WireMeter

NUMEL, WIDTH, STEPS = 47 * 1024, 512, 2  # three blocks, of which the last is short
HALF = NUMEL // 2  # of two ranks of a node, or two shards: whole 16 bytes


def _numbers(step, rank):
    """Of very different sizes, from row to row and within one."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    sizes = 10.0 ** torch.randint(-3, 3, (NUMEL // 1024,), generator=generator)
    x = torch.randn(NUMEL, generator=generator) * sizes.repeat_interleave(1024)
    x *= 2.0 ** torch.randint(-8, 3, (NUMEL,), generator=generator)
    return x * (torch.arange(NUMEL) // 64 % 8 == 0)  # zeros cost the oracle no time


class _Exchange:
    """The ranks of one exchange, in one process."""

    def __init__(self, numel, ranks, format, transport):
        self._by_owners = transport == "reduce_scatter"
        self._geometry = payloads.Geometry(numel, format, ranks if self._by_owners else 1)
        self.residuals = np.zeros((ranks, numel), np.float32)
        self.owned = np.zeros(numel, np.float32)

    @property
    def nbytes(self):
        """What a rank sends; all of them own a range here."""
        times = 2 if self._by_owners else 1
        return times * (len(self.residuals) - 1) * self._geometry.nbytes

    def bounds(self, rank):
        return self._geometry.bounds(rank)

    def mean(self, grads):
        whole, share, sent = self._geometry, 1 / len(grads), []
        for residual, grad in zip(self.residuals, grads, strict=True):
            rows = [bytearray(whole.nbytes) for _ in range(whole.ranges)]
            residual[:] = payloads.quantize_pack(residual, grad.numpy(), rows, whole)
            sent.append(rows)
        if self._by_owners:
            results, every, share = [], sent, 1.0
            for owner in range(whole.ranges):
                low, high = whole.bounds(owner)
                own = payloads.Geometry(high - low, whole.format)
                results.append(bytearray(whole.nbytes))
                self.owned[low:high], _ = payloads.dequantize_sum_pack(
                    [rows[owner] for rows in every],
                    self.owned[low:high],
                    results[-1],
                    own,
                    1 / len(every),
                )
            sent = [results]
        bits, status = payloads.dequantize_sum(sent, whole, "float32", share)
        assert not status.any()
        return torch.from_numpy(floats.widen(bits, "float32"))


class _Hook:
    """DDP. Nothing is sent whole inside a node: there is no mesh."""

    local_size, extra_bytes = None, 0

    def __init__(self, rank, format, transport):
        options = {"transport": transport, "density": 1, "format": format, "start_step": 0}
        self.model, self.state = meshed_model([NUMEL], self.local_size, **options)
        self.group = self.state._topology.between
        length = NUMEL // (self.local_size or 1)
        ranks = dist.get_world_size() // (self.local_size or 1)
        parts = range(0, NUMEL, length)
        self.exchanges = [_Exchange(length, ranks, format, transport) for _ in parts]

    def step(self, grad):
        """This rank's result of a step."""
        self.model.zero_grad()
        self.model(grad).backward()
        return self.model.module.p[0].grad.clone()

    def expected(self, grads):
        """That of every rank, of all ranks' numbers."""
        size = self.local_size or 1
        nodes = [sum(g / size for g in grads[i : i + size]) for i in range(0, len(grads), size)]
        parts = zip(*(node.split(NUMEL // size) for node in nodes), strict=True)
        return torch.cat([e.mean(p) for e, p in zip(self.exchanges, parts, strict=True)])

    def owed(self):
        """What waits everywhere, as the mean will have it, in float64."""
        return owed_by_all(self.state.state_dict())

    def go_on_from(self, other):
        self.step(torch.zeros(NUMEL))  # DDP has its buckets then
        self.state.load_state_dict(copy.deepcopy(other.state.state_dict()))

    def told(self):
        """Density, overflow and bytes of a step, and the plan."""
        stats = self.state.stats()
        return tuple(stats[key] for key in ("density", "overflow", "wire_bytes")), self.state.plan()

    def close(self):
        self.state.close()


class _NodeMesh(_Hook):
    local_size = 2


class _Sharded(_Hook):
    local_size = 2

    def __init__(self, rank, format, transport):
        mesh = shard_mesh()
        self.model = fully_shard(Dictated([NUMEL]), mesh=mesh["shard"])
        self.state = dct_fully_shard_hook(
            self.model, mesh=mesh, density=1, format=format, transport=transport, start_step=0
        )
        self.group = mesh["replicate"].get_group()
        self.exchanges = [_Exchange(HALF, 2, format, transport) for _ in range(2)]

    def step(self, grad):
        self.model.zero_grad()
        self.model(grad).backward()
        return self.model.p[0].grad.full_tensor()

    def owed(self):
        (entry,) = self.state.state_dict()["replicas"].values()
        (saved,) = entry["parameters"].values()
        own = saved["residual"].full_tensor().double()
        if "owner_residual" in saved:
            own = own + 2 * saved["owner_residual"].full_tensor().double()
        return sum(gathered(own)[::2]) / 2


class _LocalSteps(_Hook):
    """Here ranks' numbers are what they move by, and the result is everybody's weights."""

    def __init__(self, rank, format, transport):
        self.model = nn.ParameterList([torch.zeros(NUMEL)])
        self.state = DCTAverager(
            self.model, period=1, density=1, format=format, transport=transport
        )
        self.group, ranks = dist.group.WORLD, dist.get_world_size()
        self.extra_bytes = 2 * (ranks - 1) * 8 // ranks  # whether all weights are finite
        self.exchanges = [_Exchange(NUMEL, ranks, format, transport)]
        self.base = torch.zeros(NUMEL)

    @torch.no_grad()
    def step(self, grad):
        self.model[0] += grad
        self.state.average_parameters()
        return weights(self.model)

    def expected(self, grads):
        self.base += self.exchanges[0].mean([self.base + grad - self.base for grad in grads])
        return self.base

    def owed(self):
        total = sum(owed(self.state.state_dict()).values()).double()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    def go_on_from(self, other):
        self.model.load_state_dict(other.model.state_dict())
        self.state.load_state_dict(copy.deepcopy(other.state.state_dict()))

    def close(self):
        pass


class _Tables(_LocalSteps):
    """Replicas of a table of which every row changes; an exchange is new at each sync."""

    def __init__(self, rank, format, transport):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        rows = [NUMEL // WIDTH]
        self.bags = ShardedEmbeddingBags([torch.zeros(rows[0], WIDTH)], plan_shards(rows, 1), mesh)
        self.optimizer = torch.optim.SGD([self.bags.weight], lr=1)
        self.state = ReplicaSync(
            self.bags, optimizer=self.optimizer, density=1, format=format, transport=transport
        )
        self.group, self.base = mesh.get_group("replicate"), torch.zeros(NUMEL)
        self.extra_bytes = 8 + 4 * rows[0]  # how many rows changed, and which
        self.settings, self.waits = (NUMEL, 2, format, transport), torch.zeros(2, NUMEL)
        self.exchanges = [_Exchange(*self.settings)]

    def step(self, grad):
        self.bags.weight.grad = -grad.view(-1, WIDTH)
        self.optimizer.step()
        self.state.step()
        return self.bags.weight.detach().flatten().clone()

    def expected(self, grads):
        self.exchanges[0] = once = _Exchange(*self.settings)
        moved = [w + (self.base + g - self.base) for w, g in zip(self.waits, grads, strict=True)]
        self.base += once.mean(moved)
        self.waits = torch.from_numpy(once.residuals)
        for rank, waits in enumerate(self.waits if "reduce_scatter" in self.settings else ()):
            low, high = once.bounds(rank)
            waits[low:high] += 2 * torch.from_numpy(once.owned)[low:high]
        return self.base

    def owed(self):
        return sum(gathered(self.state._average.residual.flatten().double())) / 2


def _holds(make, rank):
    for format, transport in itertools.product(payloads.FORMATS, TRANSPORTS):
        what, ranks = (format, transport), dist.get_world_size()
        door = make(rank, format, transport)
        applied, total = torch.zeros(2, NUMEL, dtype=torch.float64)
        for step in range(STEPS):
            grads = [_numbers(step, r) for r in range(ranks)]
            with WireMeter(door.group) as meter:
                got = door.step(grads[rank])
                sent = meter.take()
            assert_same(got)
            if rank == 0:
                assert torch.equal(got, door.expected(grads)), (what, step)
            applied = got.double() + (0 if isinstance(door, _LocalSteps) else applied)
            total += sum(grad.double() for grad in grads) / ranks
        left = door.owed()
        assert bool(left.any()) == (format != "float32"), what
        # Two roundings a step to float32, of numbers up to the largest of their row.
        largest = sum(_numbers(s, r).abs() for s in range(STEPS) for r in range(ranks))
        largest = largest.view(-1, 1024).amax(1).repeat_interleave(1024)
        assert ((applied + left - total).abs() <= 1e-6 * largest).all(), what
        nbytes = door.exchanges[0].nbytes
        assert sent == nbytes + door.extra_bytes, what
        again = make(rank, format, transport)
        if make is _Tables:  # a flush leaves nothing to save
            door.state.flush()
            flushed = door.bags.weight.detach().flatten()
            assert_same(flushed)
            assert ((flushed - total).abs() <= 1e-6 * largest).all(), what
            continue
        told, plan = door.told()
        assert told == (1, 0, nbytes), what
        assert f"{nbytes:,}" in plan and f"{format} values" in plan and "Capacity" not in plan
        again.go_on_from(door)
        grad = _numbers(STEPS, rank)
        assert torch.equal(door.step(grad), again.step(grad)), what
        door.close()
        again.close()


@on_ranks(3)
def test_ddp(rank):
    _holds(_Hook, rank)


@on_ranks(4)
def test_ddp_on_nodes(rank):
    _holds(_NodeMesh, rank)


@on_ranks(4)
def test_fsdp2(rank):
    _holds(_Sharded, rank)


@on_ranks(2)
def test_local_steps(rank):
    _holds(_LocalSteps, rank)


@on_ranks(2)
def test_replicas_of_tables(rank):
    _holds(_Tables, rank)
