"""DCTAverager with FSDP2: shards inside a replica, local steps between replicas.

Most meshes have 2 replicas of 2 shards. Rank r holds shard r % 2 of replica r // 2.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dct_parallel import DCTAverager
from support.ranks import (
    Dictated,
    assert_same,
    assert_same_states,
    entry,
    gathered,
    on_ranks,
    shard_mesh,
    through_a_file,
)

SHAPES = (301, 7), (1, 900), (31,), (2000, 2)  # an odd number of rows; one row for two shards


def _sharded(mesh, shapes=SHAPES):
    """Return a model with different weights per rank, and AdamW. Parameter p.2 is frozen."""
    model = Dictated(shapes)
    for parameter in model.p[2:3]:
        parameter.requires_grad_(False)
    fully_shard(model, mesh=mesh["shard"])
    with torch.no_grad():
        for local in _locals(model):
            local += torch.randn(local.shape) + dist.get_rank()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _locals(model):
    with torch.no_grad():
        return [parameter.to_local() for parameter in model.parameters()]


def _flat(model):
    return torch.cat([local.flatten() for local in _locals(model)])


def _full(model):
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def _gradients(model, step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return [torch.randn(parameter.shape, generator=generator) for parameter in model.parameters()]


def _train_step(model, optimizer, step):
    optimizer.zero_grad()
    model(*_gradients(model, step)).backward()
    optimizer.step()


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[1:2]], ids=["uneven", "one-shard-is-empty"])
@on_ranks(4)
def test_shards_are_averaged_like_whole_weights(rank, shapes):
    """The reference averages an unsharded module with this rank's shards, and does not resume."""
    warnings.filterwarnings("ignore", "DCT: AdamW divides")  # with step_ahead
    mesh = shard_mesh()
    group = mesh["replicate"].get_group()
    formats = ("ternary", "int4", "bfloat16", "float32") if shapes is SHAPES else ("float32",)
    for format, ahead in (*((format, False) for format in formats), ("ternary", True)):
        model, optimizer = _sharded(mesh, shapes)
        local = _locals(model)
        plain = nn.ParameterList(value.clone() for value in local)
        for parameter, sharded in zip(plain, model.parameters(), strict=True):
            parameter.requires_grad_(sharded.requires_grad)
        options = {"period": 2, "format": format, "process_group": group, "step_ahead": ahead}
        averager, other = DCTAverager(model, **options), DCTAverager(plain, **options)
        assert averager.wire_bytes == other.wire_bytes
        for step in range(6):
            _train_step(model, optimizer, step)
            ones = [torch.ones(p.shape) for p in model.parameters()]
            with torch.no_grad():
                model(*ones)  # FSDP2 keeps root parameters gathered after this
                for parameter, value in zip(plain, local, strict=True):
                    parameter.copy_(value)
            averager.average_parameters()
            other.average_parameters()
            if step == 2:  # between two averagings
                saved, kept = through_a_file(averager.state_dict()), [v.clone() for v in local]
                averager = DCTAverager(model, **options)  # broadcasts weights
                torch._foreach_copy_(local, kept)
                averager.load_state_dict(saved)
            for parameter, value in zip(plain, local, strict=True):
                assert torch.equal(parameter, value), (format, step)
            with torch.no_grad():
                total = model(*ones)
            model.reshard()
            torch.testing.assert_close(total, _full(model).sum())
            if step % 2 == 1 and not ahead:
                assert_same(_full(model))
        averager.flush()
        other.flush()
        assert all(map(torch.equal, plain, local))
        assert_same(_full(model))
        assert averager.stats() == other.stats()
        averager.plan()
        _train_step(model, optimizer, 6)
        model.load_state_dict({n: torch.full_like(p, 0.5) for n, p in model.named_parameters()})
        averager.flush()
        assert (_flat(model) == 0.5).all()


@on_ranks(4)
def test_nan_in_one_shard_raises_on_all_ranks(rank):
    """The changes of other entries are kept."""
    mesh = shard_mesh()
    model, _ = _sharded(mesh, SHAPES[::3])
    group = mesh["replicate"].get_group()
    averager = DCTAverager(model, period=1, format="float32", density=0.05, process_group=group)
    start = _flat(model)
    generator = torch.Generator().manual_seed(rank)
    moved = torch.randint(-8, 9, start.shape, generator=generator) / 8
    moved[0] = 0  # a change here would be lost, because this entry becomes NaN
    with torch.no_grad():
        parts = moved.split([local.numel() for local in _locals(model)])
        for local, part in zip(_locals(model), parts, strict=True):
            local += part.view(local.shape)
        _locals(model)[0][0, 0] = torch.nan if rank == 3 else start[0]
    text = "dct::average_parameters: weights at averaging 1 must be finite on every rank, got"
    with pytest.raises(RuntimeError, match=text):
        averager.average_parameters()
    assert torch.equal(_flat(model), start)
    averager.flush()
    both = gathered(nn.functional.pad(moved, (0, 10_000 - len(moved))))
    mean = (both[rank % 2] + both[rank % 2 + 2])[: len(moved)] / 2
    torch.testing.assert_close(_flat(model), start + mean, rtol=0, atol=1e-6)
    before = averager.state_dict()
    if rank == 2:
        _locals(model)[0][0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="dct::flush: weights must be finite on every rank"):
        averager.flush()
    assert_same_states(averager.state_dict(), before)


@on_ranks(4)
def test_unsupported_groups_modules_and_states_raise(rank):
    mesh = shard_mesh()
    group = mesh["replicate"].get_group()

    def refused(text, module, error=ValueError, **options):
        with pytest.raises(error, match=text):
            DCTAverager(module, **{"process_group": group, **options})

    model, _ = _sharded(mesh)
    one = {0: "1", 1: "0", 2: "3", 3: "2"}[rank]
    for wrong in (None, mesh["shard"].get_group()):
        text = "process_group must be the ranks with the same shard, .* got a group that contains "
        text += f"other shards of this replica, on rank {one}$"
        refused(text, model, process_group=wrong)
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    refused("shard must be the same on every rank, got", model, process_group=crossed)

    rule = "must be sharded by fully_shard.*, like every other, got"
    mixed = nn.ModuleList([model, nn.Linear(2, 2)])
    refused(rf"parameter 1\.weight {rule} one that is not sharded", mixed)
    refused(rf"parameter p\.0 {rule} .*Replicate", fully_shard(Dictated(SHAPES), mesh=mesh))
    replicated = distribute_tensor(torch.zeros(5), mesh["shard"], [Replicate()])
    refused(rf"parameter 0 {rule} \(Replicate", nn.ParameterList([nn.Parameter(replicated)]))

    averager = DCTAverager(model, period=1, process_group=group)
    # Row shards and column shards of a square matrix have the same size.
    squares = Dictated([(4, 4)]), Dictated([(4, 4)])
    fully_shard(squares[0], mesh=mesh["shard"])
    fully_shard(squares[1], mesh=mesh["shard"], shard_placement_fn=lambda _: Shard(1))
    rows, columns = (DCTAverager(square, process_group=group) for square in squares)
    with pytest.raises(ValueError, match=f"shard must be {rank % 2} of 2, cut along 1, as in this"):
        columns.load_state_dict(rows.state_dict())
    columns.load_state_dict(columns.state_dict())

    row = shard_mesh(1, 4)
    narrow, _ = _sharded(row)
    other = DCTAverager(narrow, period=1, process_group=row["replicate"].get_group())
    assert entry(other.state_dict())["shard"] == f"{rank} of 4"
    got = f"got {rank % 2} of 2"
    with pytest.raises(ValueError, match=f"shard must be {rank} of 4, as in this run, {got}"):
        other.load_state_dict(averager.state_dict())
