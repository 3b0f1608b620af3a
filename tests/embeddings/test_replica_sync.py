"""Syncs of replicas in each format: sent and pending changes, rows, and loads."""

import copy
import math
from functools import partial
from itertools import cycle
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from dct_embeddings import (
    MomentumScaledRowWiseAdagrad,
    ReplicaSync,
    RowWiseAdagrad,
    ShardedEmbeddingBags,
    plan_shards,
)
from dct_embeddings.two_dimensional import averages
from dct_kernels import sample_threshold
from dct_parallel.exchange import reduce_scatter
from dct_parallel.exchange import transport as all_gather
from support.ranks import assert_same, corrupting, gathered, on_ranks
from wire_meter import WireMeter

ROWS, WIDTH, BATCH, LR = [40, 25], 8, 4, 0.1
DENSITY = 0.1
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=LR),
    "rowwise": partial(RowWiseAdagrad, lr=LR),
    "delayed": partial(MomentumScaledRowWiseAdagrad, lr=LR, scale=2, delayed=True),
}
COMPRESSED = [{"format": "bfloat16", "density": DENSITY}]
COMPRESSED += [{"format": format} for format in ("int8", "int4", "ternary")]
FORMATS = [{}, {"format": "bfloat16"}, *COMPRESSED]


def _bags(rows=ROWS, dtype=torch.float32, shape=(2, 1), **settings):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(n, WIDTH, generator=generator).to(dtype) for n in rows]
    return ShardedEmbeddingBags(tables, plan_shards(rows, shape[1]), mesh, **settings)


def _ids(step, rank, rows=ROWS, batch=BATCH):
    """One id per bag. Low ids are more frequent, so replicas share some ids."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    drawn = torch.rand(len(rows), batch, generator=generator) ** 2
    return (drawn * torch.tensor(rows).unsqueeze(1)).long()


def _train(bags, optimizer, step, rank, rows=ROWS, batch=BATCH):
    ids = _ids(step, rank, rows, batch)
    optimizer.zero_grad()
    out = bags(ids.flatten(), torch.ones_like(ids))
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sin().mean().backward()
    optimizer.step()


def _state(bags, optimizer):
    found = optimizer.state[bags.weight]
    return found.get("pending", found.get("sum"))


def _copies(tensor):
    """`tensor` of all replicas, in order."""
    return gathered(tensor.detach())


def _snapshot(bags, optimizer):
    """Copies of the weight and of the averaged optimizer state, for an oracle."""
    state = _state(bags, optimizer)
    return bags.weight.detach().clone(), None if state is None else state.clone()


def _looked_up(first, last, rows=ROWS, replicas=2, batch=BATCH):
    """The rows of the weight that each replica looks up in steps first to last - 1."""
    offset = torch.tensor([[0], [rows[0]]])
    return [
        torch.cat(
            [(_ids(s, rank, rows, batch) + offset).flatten() for s in range(first, last)]
        ).unique()
        for rank in range(replicas)
    ]


@on_ranks(4)
def test_first_sync_after_a_load_compares_replicas(rank):
    """The replicas of one shard load different weights. Every rank raises."""
    bags = _bags(shape=(2, 2))
    optimizer = torch.optim.SGD([bags.weight], lr=LR)
    sync, state = ReplicaSync(bags, optimizer=optimizer), copy.deepcopy(bags.state_dict())
    bags.load_state_dict(state | {"weight": state["weight"] + (rank == 3)})
    text = "weight of the loaded state must be the same on every rank, got .* on rank 1, .* rank 3"
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            sync.sync()
    bags.load_state_dict(state)
    _train(bags, optimizer, 0, rank)
    sync.sync()
    sums = _copies(bags.weight.double().sum())
    assert sums[:2] == sums[2:]
    bags = _bags(shape=(2, 2))
    optimizer = RowWiseAdagrad([bags.weight])
    optimizer.state[bags.weight]["sum"] += rank == 3
    with pytest.raises(ValueError, match="state of optimizer must be the same on every rank, got"):
        ReplicaSync(bags, optimizer=optimizer)


@pytest.mark.parametrize(
    ("replicas", "many", "transport"),
    [(2, False, "all_gather"), (3, True, "reduce_scatter")],
)
@on_ranks("replicas")
def test_compressed_changes_are_sent_and_the_rest_stays_pending(rank, replicas, transport, many):
    rows, batch = ([9000, 25], 1200) if many else (ROWS, BATCH)  # else less than a block
    for (name, make), settings in zip(cycle(OPTIMIZERS.items()), COMPRESSED, strict=False):
        settings = settings | {"transport": transport}
        bags = _bags(rows, shape=(replicas, 1))
        optimizer = make([bags.weight])
        sync = ReplicaSync(bags, optimizer=optimizer, every=2, **settings)
        average, group = sync._average, bags.mesh.get_group("replicate")
        pending = torch.zeros(sum(rows), WIDTH)  # the oracle's pending changes
        known_rows = torch.empty(0, dtype=torch.int64)
        for period in range(3):
            synced, _ = _snapshot(bags, optimizer)
            for step in (2 * period, 2 * period + 1):
                _train(bags, optimizer, step, rank, rows, batch)
                if step % 2 == 0:
                    sync.step()
            trained, state = _snapshot(bags, optimizer)
            total = optimizer.state[bags.weight].get("sum", torch.zeros(0)).clone()
            touched = _looked_up(2 * period, 2 * period + 2, rows, replicas, batch)
            known_rows = torch.cat([known_rows, *touched]).unique()
            sync.step()
            assert torch.equal(average.rows, known_rows.int())
            accumulated = pending + (trained - synced)
            pending = torch.zeros_like(pending)
            pending[known_rows] = average.residual
            moved = bags.weight.detach().double() - synced
            # Each change is either sent or pending, and other rows are unchanged.
            changes, left = (sum(_copies(tensor.double())) for tensor in (accumulated, pending))
            near = 1e-6 * max(synced.abs().max(), changes.abs().max())
            assert (replicas * moved + left - changes).abs().max() < near
            assert moved.abs().sum() > 0.05 * changes.abs().sum() / replicas
            others = torch.ones(sum(rows), dtype=torch.bool)
            others[known_rows] = False
            assert not moved[others].any()
            assert_same(bags.weight.detach())
            for of_state in optimizer.state[bags.weight].values():
                if isinstance(of_state, torch.Tensor):
                    assert_same(of_state)
            if name != "sgd":
                mean = sum(_copies(state.double())) / replicas
                assert mean.any()
                if name == "delayed":
                    assert not _state(bags, optimizer).any()
                    mean += total
                got = optimizer.state[bags.weight]["sum"].double()
                assert torch.allclose(got, mean, rtol=1e-6, atol=0)

        # flush() sends the pending changes, and keeps the optimizer state.
        assert pending.any()
        synced, state = _snapshot(bags, optimizer)
        sync.flush()
        mean = sum(_copies(pending.double())) / replicas
        assert (bags.weight - (synced + mean)).abs().max() < near
        assert state is None or torch.equal(_state(bags, optimizer), state)
        assert_same(bags.weight.detach())
        assert average.rows.untyped_storage().nbytes() == 0  # the memory is freed
        assert average.residual.untyped_storage().nbytes() == 0
        before = bags.weight.detach().clone()
        with WireMeter(group) as meter:
            sync.sync()
            sync.flush()
            assert meter.take() == 2 * 8 * (replicas - 1)
        assert torch.equal(bags.weight, before)


class _Sizes(TorchDispatchMode):
    """Records the size of the largest result that is not stored in a `known` tensor."""

    def __init__(self, *known):
        super().__init__()
        self._known = {tensor.data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, torch.Tensor) and made.data_ptr() not in self._known:
                self.largest = max(self.largest, made.numel())
        return out


@on_ranks(2)
def test_a_sync_accesses_only_rows_that_were_looked_up(rank):
    rows = [50000, 3]
    for settings in FORMATS:
        bags = _bags(rows)
        optimizer = OPTIMIZERS["delayed"]([bags.weight])
        sync = ReplicaSync(bags, optimizer=optimizer, **settings)
        start = bags.weight.detach().clone()
        _train(bags, optimizer, 0, rank, rows)
        looked_up = [_ids(0, r, rows) + torch.tensor([[0], [rows[0]]]) for r in (0, 1)]
        union = torch.cat([ids.flatten() for ids in looked_up]).unique()
        others = torch.ones(sum(rows), dtype=torch.bool)
        others[union] = False
        state = optimizer.state[bags.weight]
        with torch.no_grad():  # reading these rows would give NaN
            for tensor in (bags.weight, *state.values()):
                tensor[others] = math.nan
        known = sync._average.touched._known
        with _Sizes(bags.weight, known, *state.values()) as made:
            sync.step()
        assert 0 < made.largest <= 4096  # the number of entries sampled for a threshold
        assert bags.weight[others].isnan().all() and bags.weight[union].isfinite().all()
        assert (bags.weight[union] != start[union]).any()
        assert state["sum"][union].isfinite().all() and (state["sum"][union] > 0).any()
        assert torch.equal(*_copies(bags.weight[union]))


@on_ranks(2)
def test_loaded_tables_are_the_new_base(rank):
    for settings in FORMATS:
        bags = _bags()
        optimizer = OPTIMIZERS["rowwise"]([bags.weight])
        sync = ReplicaSync(bags, optimizer=optimizer, every=2, **settings)
        for step in range(3):
            _train(bags, optimizer, step, rank)
            sync.step()
        best = torch.randn(bags.weight.shape, generator=torch.Generator().manual_seed(7))
        bags.load_state_dict({**bags.state_dict(), "weight": best})
        changed = torch.zeros_like(best)
        if settings:  # without settings, the sync averages the weights
            _train(bags, optimizer, 3, rank)
            changed = sum(part / 2 for part in _copies(bags.weight - best))
        sync.flush()  # sends only the changes after the load
        torch.testing.assert_close(bags.weight, best + changed, rtol=0, atol=1e-6)
        assert torch.equal(*_copies(_state(bags, optimizer)))


@on_ranks(2)
def test_the_number_of_a_sync_is_the_seed_of_its_threshold(rank):
    rows, made = [9000, 25], []

    class Recorded(averages.Bucket):
        def start(self, buffer, inv_scale=None):
            made.append((self, buffer.clone()))
            super().start(buffer, inv_scale)

    averages.Bucket = Recorded
    bags = _bags(rows)
    optimizer = OPTIMIZERS["sgd"]([bags.weight])
    sync = ReplicaSync(bags, optimizer=optimizer, **COMPRESSED[0])
    for step in range(3):
        _train(bags, optimizer, step, rank, rows, batch=1200)
        sync.step()
    for seed, (bucket, moved) in enumerate(made):
        sampled = sample_threshold(moved, torch.zeros_like(moved), DENSITY, 1, 4096, seed)
        assert torch.equal(bucket.codec.threshold, sampled)
    assert len(made) == 3


@on_ranks(2)
def test_float32_rows_and_bfloat16_changes(rank):
    for format in ("float32", torch.bfloat16):
        bags = _bags()
        optimizer = OPTIMIZERS["rowwise"]([bags.weight])
        sync = ReplicaSync(bags, optimizer=optimizer, format=format)
        base = bags.weight.detach().clone()
        _train(bags, optimizer, 0, rank)
        trained, state = _snapshot(bags, optimizer)
        touched = _looked_up(0, 1)
        union = torch.cat(touched).unique()
        with WireMeter(bags.mesh.get_group("replicate")) as meter:
            sync.step()
            sent = meter.take()
        bytes_a_row = WIDTH * (4 if format == "float32" else 2) + 4  # rings of 2 ranks
        assert sent == 8 + 4 * max(map(len, touched)) + len(union) * bytes_a_row
        if format == "float32":
            expected = sum(part / 2 for part in _copies(trained))
        else:
            expected = base + sum(part.bfloat16() / 2 for part in _copies(trained - base))
        assert torch.equal(bags.weight, expected)
        assert torch.equal(_state(bags, optimizer), sum(part / 2 for part in _copies(state)))
        untouched = torch.ones(sum(ROWS), dtype=torch.bool)
        untouched[union] = False
        assert torch.equal(bags.weight[untouched], base[untouched])
        synced, _ = _snapshot(bags, optimizer)
        _train(bags, optimizer, 1, rank)
        trained, _ = _snapshot(bags, optimizer)
        sync.flush()  # sends all changes without rounding
        mean = sum(_copies(trained.double())) / 2
        assert torch.allclose(bags.weight.double(), mean, rtol=0, atol=2e-7)
        assert not torch.equal(bags.weight, synced)
        assert torch.equal(*_copies(bags.weight))


@on_ranks(2)
def test_a_damaged_payload_raises(rank):
    """The payload from `sender` is damaged on its way to all ranks."""
    for module, sender, settings in (
        (all_gather, 1, COMPRESSED[0] | {"transport": "all_gather"}),
        (reduce_scatter, 0, {"format": "int4", "transport": "reduce_scatter"}),
    ):

        def change(output, sender=sender):
            output.view(2, -1)[sender, 0] += 1

        bags = _bags()
        optimizer = OPTIMIZERS["sgd"]([bags.weight])
        sync = ReplicaSync(bags, optimizer=optimizer, **settings)
        _train(bags, optimizer, 0, rank)
        text = rf"every payload of sync 0 must be intact, got status \d+ from rank {sender}"
        patched = mock.patch.object(module, "all_gather", corrupting(module.all_gather, change))
        with patched, pytest.raises(RuntimeError, match=text):
            sync.step()
        for call in (sync.sync, sync.flush):  # later calls also raise
            with pytest.raises(RuntimeError, match=f"from rank {sender}"):
                call()
