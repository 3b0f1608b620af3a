"""What crosses at a sync, what waits, and what it costs: compressed, in 16 bits, as it is."""

import copy
import math
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
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
from dct_kernels import payload_layout
from dct_parallel import WireMeter
from ranks import run_ranks

ROWS, WIDTH, BATCH, LR = [40, 25], 8, 4, 0.1
DENSITY = 0.1
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=LR),
    "rowwise": partial(RowWiseAdagrad, lr=LR),
    "delayed": partial(MomentumScaledRowWiseAdagrad, lr=LR, scale=2, delayed=True),
}


def _bags(rows=ROWS, dtype=torch.float32, shape=(2, 1), **settings):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(n, WIDTH, generator=generator).to(dtype) for n in rows]
    return ShardedEmbeddingBags(tables, plan_shards(rows, shape[1]), mesh, **settings)


def _ids(step, rank, rows=ROWS):
    """One id a bag, the lower ones more often, so that replicas share some."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    drawn = torch.rand(len(rows), BATCH, generator=generator) ** 2
    return (drawn * torch.tensor(rows).unsqueeze(1)).long()


def _train(bags, optimizer, step, rank, rows=ROWS):
    ids = _ids(step, rank, rows)
    optimizer.zero_grad()
    out = bags(ids.flatten(), torch.ones_like(ids))
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sin().mean().backward()
    optimizer.step()


def _state(bags, optimizer):
    found = optimizer.state[bags.weight]
    return found.get("pending", found.get("sum"))


def _both(tensor):
    """This tensor of both replicas; their shapes may differ."""
    parts = [None, None]
    dist.all_gather_object(parts, tensor.detach().clone())
    return parts


class _Known:
    """What a replica has at a time, for an oracle to start from."""

    def __init__(self, bags, optimizer):
        self.weight = bags.weight.detach().clone()
        state = _state(bags, optimizer)
        self.state = None if state is None else state.clone()


def _looked_up(first, last):
    """Rows of the weight that rank 0 and rank 1 look up in steps first to last - 1."""
    offset = torch.tensor([[0], [ROWS[0]]])
    return [
        torch.cat([(_ids(step, rank) + offset).flatten() for step in range(first, last)]).unique()
        for rank in (0, 1)
    ]


def _deltas(rank, name):
    bags = _bags()
    optimizer = OPTIMIZERS[name]([bags.weight])
    sync = ReplicaSync(bags, optimizer, every=2, density=DENSITY)
    largest = sync._average
    waiting = torch.zeros(sum(ROWS), WIDTH)  # of all rows, for the oracle
    known_rows, delivered_before = set(), 0
    synced = _Known(bags, optimizer)
    for period in range(4):
        _train(bags, optimizer, 2 * period, rank)
        sync.step()
        _train(bags, optimizer, 2 * period + 1, rank)
        trained = _Known(bags, optimizer)
        if name == "delayed":
            total = optimizer.state[bags.weight]["sum"].clone()
        touched = _looked_up(2 * period, 2 * period + 2)
        further = max(len(set(rows.tolist()) - known_rows) for rows in touched)
        known_rows |= {row for rows in touched for row in rows.tolist()}
        with WireMeter(bags.mesh.get_group("replicate")) as meter:
            sync.step()
            sent = meter.take()

        union = torch.tensor(sorted(known_rows))
        assert torch.equal(largest.rows, union.int())
        accumulated = waiting + (trained.weight - synced.weight)
        after = torch.zeros_like(waiting)
        after[union] = largest.residual
        # Of each table as many entries as the density says, the largest; bfloat16 rounds them.
        for low, high in ((0, ROWS[0]), (ROWS[0], sum(ROWS))):
            rows = union[(union >= low) & (union < high)]
            entries, left = accumulated[rows].flatten(), after[rows].flatten()
            went = entries != left
            # A row that this replica did not look up has zeros, which are never sent.
            count = min(math.ceil(DENSITY * entries.numel()), int((entries != 0).sum()))
            assert went.sum() <= count and went.sum() > 0.8 * count  # some are of 8 bits as it is
            passed = entries.abs().sort(descending=True).values[count - 1]
            assert (entries[went].abs() >= passed).all()
            assert torch.equal(left[entries.abs() < passed], entries[entries.abs() < passed])
        delivered = accumulated - after
        assert torch.equal(delivered, delivered.bfloat16().float())
        mean = torch.zeros_like(delivered)
        for part in _both(delivered):
            mean = mean + part
        mean = mean * 0.5
        expected = synced.weight.clone()
        expected[union] += mean[union]
        assert torch.equal(bags.weight, expected)
        assert mean.abs().sum() > 0
        delivered_before += mean

        layout = payload_layout(
            len(union) * WIDTH,
            min(math.ceil(1.25 * DENSITY * len(union) * WIDTH) + 2, len(union) * WIDTH),
            torch.bfloat16,
        )
        most = max(map(len, touched))
        bytes_of_state = payload_layout(len(union), most, torch.float32).nbytes
        expected_bytes = 16 + 4 * further + layout.nbytes
        expected_bytes += 0 if name == "sgd" else bytes_of_state
        assert sent == expected_bytes

        assert torch.equal(*_both(bags.weight))
        for of_state in optimizer.state[bags.weight].values():
            if isinstance(of_state, torch.Tensor):
                assert torch.equal(*_both(of_state)) and (of_state >= 0).all()
        if name == "rowwise":
            gains = _both(trained.state - synced.state)
            assert torch.equal(_state(bags, optimizer), synced.state + (gains[0] + gains[1]) * 0.5)
            assert (_state(bags, optimizer) >= synced.state).all()
        if name == "delayed":
            assert not _state(bags, optimizer).any()
            gained = sum(_both(trained.state)) * 0.5
            assert torch.equal(optimizer.state[bags.weight]["sum"], total + gained)
        waiting, synced = after, _Known(bags, optimizer)

    # What waits is delivered, and nothing else happens.
    assert waiting.any()
    sync.flush()
    mean = sum(part / 2 for part in _both(waiting))
    assert torch.allclose(bags.weight, synced.weight + mean, rtol=0, atol=1e-7)
    assert torch.equal(*_both(bags.weight))
    assert largest.rows.untyped_storage().nbytes() == 0  # freed, not out of sight
    assert largest.residual.untyped_storage().nbytes() == 0
    before = bags.weight.detach().clone()
    sync.flush()
    assert torch.equal(bags.weight, before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_largest_entries_are_delivered_and_the_rest_waits(name):
    run_ranks(_deltas, 2, name)


class _Sizes(TorchDispatchMode):
    """The largest tensor that is made; writing into `known` makes none."""

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


FORMATS = [{}, {"dtype": torch.float16}, {"dtype": torch.bfloat16}, {"density": DENSITY}]


def _costs_what_changed(rank):
    rows = [5000, 3]
    for settings in FORMATS:
        bags = _bags(rows)
        optimizer = OPTIMIZERS["delayed"]([bags.weight])
        sync = ReplicaSync(bags, optimizer, **settings)
        start = bags.weight.detach().clone()
        _train(bags, optimizer, 0, rank, rows)
        looked_up = [_ids(0, r, rows) + torch.tensor([[0], [rows[0]]]) for r in (0, 1)]
        union = torch.cat([ids.flatten() for ids in looked_up]).unique()
        others = torch.ones(sum(rows), dtype=torch.bool)
        others[union] = False
        state = optimizer.state[bags.weight]
        with torch.no_grad():  # were they read, it would show
            for tensor in (bags.weight, *state.values()):
                tensor[others] = math.nan
        known = sync._average._touched._known
        with _Sizes(bags.weight, known, *state.values()) as made:
            sync.step()
        payload = payload_layout(len(union) * WIDTH, 100, torch.float32).nbytes
        assert 0 < made.largest <= 2 * payload
        assert bags.weight[others].isnan().all() and bags.weight[union].isfinite().all()
        assert (bags.weight[union] != start[union]).any()
        assert state["sum"][union].isfinite().all() and (state["sum"][union] > 0).any()
        assert torch.equal(*_both(bags.weight[union]))


def test_a_sync_reads_and_writes_only_rows_that_were_looked_up():
    run_ranks(_costs_what_changed, 2)


def _other_formats(rank):
    for dtype in (None, torch.float16, torch.bfloat16):
        bags = _bags()
        optimizer = OPTIMIZERS["rowwise"]([bags.weight])
        sync = ReplicaSync(bags, optimizer, dtype=dtype)
        base = bags.weight.detach().clone()
        _train(bags, optimizer, 0, rank)
        trained = _Known(bags, optimizer)
        touched = _looked_up(0, 1)
        union = torch.cat(touched).unique()
        with WireMeter(bags.mesh.get_group("replicate")) as meter:
            sync.step()
            sent = meter.take()
        bytes_a_row = WIDTH * (4 if dtype is None else 2) + 4  # rings of 2
        assert sent == 16 + 4 * max(map(len, touched)) + len(union) * bytes_a_row
        if dtype is None:
            expected = sum(part / 2 for part in _both(trained.weight))
        else:
            expected = base + sum(part.to(dtype) / 2 for part in _both(trained.weight - base))
        assert torch.equal(bags.weight, expected)
        assert torch.equal(_state(bags, optimizer), sum(part / 2 for part in _both(trained.state)))
        untouched = torch.ones(sum(ROWS), dtype=torch.bool)
        untouched[union] = False
        assert torch.equal(bags.weight[untouched], base[untouched])
        sync.flush()  # a sync like others: nothing was waiting
        assert torch.equal(*_both(bags.weight))


def test_rows_as_they_are_and_deltas_in_16_bits():
    run_ranks(_other_formats, 2)


def _saved_run(rank):
    bags = _bags()
    optimizer = OPTIMIZERS["rowwise"]([bags.weight])
    sync = ReplicaSync(bags, optimizer, every=2, density=DENSITY)
    for step in range(5):
        _train(bags, optimizer, step, rank)
        sync.step()
    sync.flush()
    saved = bags.state_dict(), optimizer.state_dict()
    copies = [torch.equal(*_both(tensor)) for tensor in (bags.weight, _state(bags, optimizer))]
    assert all(copies)
    return saved


def _goes_on_alone(rank, saved, settings):
    saved = copy.deepcopy(saved)  # it came in memory that is shared with later runs
    bags = _bags(shape=(1, 1))
    optimizer = OPTIMIZERS["rowwise"]([bags.weight])
    bags.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    alone = nn.Parameter(bags.weight.detach().clone())
    of_alone = OPTIMIZERS["rowwise"]([alone])
    of_alone.load_state_dict(copy.deepcopy(saved[1]))
    sync = ReplicaSync(bags, optimizer, every=2, **settings)
    for step in range(5, 8):
        _train(bags, optimizer, step, rank)
        sync.step()
        ids = _ids(step, rank)
        out = nn.functional.embedding(ids.t() + torch.tensor([0, ROWS[0]]), alone, sparse=True)
        of_alone.zero_grad()
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sin().mean().backward()
        of_alone.step()
    assert torch.allclose(bags.weight, alone, rtol=0, atol=1e-6)
    assert not torch.equal(alone.detach(), saved[0]["weight"])
    return bags.weight.detach()


def test_what_a_replica_saved_goes_on_with_one_replica():
    """After flush() weights and accumulators are all there is; one replica has no one to meet."""
    saved = run_ranks(_saved_run, 2)[0]
    ends = [run_ranks(_goes_on_alone, 1, saved, settings)[0] for settings in FORMATS]
    assert all(torch.equal(end, ends[0]) for end in ends)


def _refusals(rank):
    bags, wide = _bags(), _bags(dtype=torch.float64)
    optimizer, of_wide = (OPTIMIZERS["sgd"]([own.weight]) for own in (bags, wide))
    for error, text, make in (
        (
            ValueError,
            r"dct::ReplicaSync: density must be in \(0, 1\], got 0",
            lambda: ReplicaSync(bags, optimizer, density=0.0),
        ),
        (
            ValueError,
            "density must be None with dtype torch.float16, got 0.1",
            lambda: ReplicaSync(bags, optimizer, density=0.1, dtype=torch.float16),
        ),
        (
            TypeError,
            "dtype must be float16 or bfloat16, got float32",
            lambda: ReplicaSync(bags, optimizer, dtype=torch.float32),
        ),
        (
            TypeError,
            "weight of bags, with a density, must be float32, got float64",
            lambda: ReplicaSync(wide, of_wide, density=0.1),
        ),
        (
            ValueError,
            "density must be the same on every rank, got 0.1 on rank 0, 0.2 on rank 1",
            lambda: ReplicaSync(bags, optimizer, density=0.1 * (1 + rank)),
        ),
    ):
        with pytest.raises(error, match=text):
            make()

    # What comes damaged is not added: the error says from whom.
    sync = ReplicaSync(bags, optimizer, density=DENSITY)
    _train(bags, optimizer, 0, rank)
    gather = averages.all_gather

    def damaging(output, tensor, group):
        gather(output, tensor, group)
        if output.dtype == torch.uint8:
            output[1, 0] += 1

    averages.all_gather = damaging
    with pytest.raises(RuntimeError, match=r"every payload must be intact, got status {1"):
        sync.step()


def test_what_is_refused():
    run_ranks(_refusals, 2)


def _dies(rank):
    bags = _bags()
    optimizer = OPTIMIZERS["rowwise"]([bags.weight])
    sync = ReplicaSync(bags, optimizer, density=DENSITY)
    _train(bags, optimizer, 0, rank)
    sync.step()
    if rank == 1:
        os._exit(7)
    _train(bags, optimizer, 1, rank)  # alone in its sharding group, it can
    sync.step()


def test_a_replica_that_dies_ends_the_others_with_an_error():
    # Not -9: the survivor ended by itself.
    with pytest.raises(RuntimeError, match=r"(?s)exit codes \[1, 7\].*in sync\b"):
        run_ranks(_dies, 2)
