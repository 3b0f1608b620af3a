"""compress_fully_shard: bytes, and the combination with dct_fully_shard_hook."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from dct_parallel import compress_fully_shard, dct_fully_shard_hook
from support.compressed_shards import (
    Net,
    computed_weights,
    full_weights,
    gradients,
    loss_of,
    plain_gradients,
    require_close,
    sharded,
)
from support.ranks import assert_same, on_ranks, shard_mesh
from wire_meter import WireMeter


def _train(model, rank, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def _flat(weights):
    return torch.cat([weight.flatten().float() for weight in weights.values()])


def _row(plan, name):
    """Return the bytes of a gather and of a reduce-scatter from a row of the plan."""
    (line,) = (line for line in plan.splitlines() if line.startswith(name))
    return [int(cell.replace(",", "")) for cell in line.split()[-2:]]


POLICIES = (
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16),
)


@on_ranks(3)
def test_reported_bytes_match_the_meter(rank):
    ranks = 3
    formats = [(format, format) for format in (None, "float32", "bfloat16", "int8")]
    formats.append(("int8", "int4"))
    for policy in POLICIES:
        totals = []
        for weights, grads in formats:
            for reshards in (False, True):
                model = sharded(reshard_after_forward=reshards, mp_policy=policy)
                model.blocks[0].norm.requires_grad_(False)
                state = compress_fully_shard(model, weights=weights, gradients=grads)
                assert state.stats() == {"step": 0, "wire_bytes": None}
                _train(model, rank, [0])
                # Ranks compare the order of modules in a different group.
                with WireMeter(model.head.weight.device_mesh.get_group()) as meter:
                    _train(model, rank, [1])
                    sent = meter.take()
                gather, reduce = _row(state.plan(), "total")
                # After resharding, the backward pass gathers the weights again.
                assert sent == state.stats()["wire_bytes"] == gather * (1 + reshards) + reduce
            totals.append((gather, reduce))
        dtype, sums = policy.param_dtype or torch.float32, policy.reduce_dtype or policy.param_dtype
        numel = sum(p.numel() for p in model.parameters()) * (ranks - 1) / ranks
        torch_bytes = numel * dtype.itemsize, numel * (sums or dtype).itemsize
        assert totals[0] == totals[1]
        assert all(0.98 < a / b < 1.05 for a, b in zip(totals[0], torch_bytes, strict=True))
        bits_of = ((16, 16), (8.25, 8.25), (8.25, 4.25))
        for (gathered, reduced), (of_weights, of_sums) in zip(totals[2:], bits_of, strict=True):
            cases = (gathered, torch_bytes[0], of_weights), (reduced, torch_bytes[1], of_sums)
            for is_sum, (found, uncompressed, bits) in enumerate(cases):
                if bits == 16 and uncompressed == 2 * numel and not is_sum:
                    assert found == totals[0][0]  # torch sends bfloat16 itself
                else:  # allows for vectors, headers, and padding to 1,024 entries
                    expected, padding = numel * bits / 8, 3 * (ranks - 1) * 1024 * bits / 8
                    assert 0.98 * expected < found < expected + padding + 2500, bits
        shard = sum(-(-len(p) // ranks) * p[0].numel() for p in model.parameters())
        dense = _row(state.plan(), "torch in bfloat16")
        assert dense[0] == 2 * shard * (ranks - 1) > dense[1]


@on_ranks(4)
def test_combined_with_the_hook_between_replicas(rank):
    """Ranks 0 and 1 hold the shards of one replica. Ranks 2 and 3 hold the other replica."""
    mesh = shard_mesh()
    model = sharded(mesh=mesh["shard"])
    lossless = {"density": 1.0, "format": "float32", "start_step": 0}
    hook = dct_fully_shard_hook(model, mesh=mesh, **lossless)
    state = compress_fully_shard(model, gradients="int4")
    for step in range(3):
        _train(model, rank, [step])
        assert_same(_flat(full_weights(model)))
        assert_same(_flat(computed_weights(model)))
    weights = computed_weights(model)
    model.zero_grad()
    with WireMeter(mesh["shard"].get_group()) as meter:
        loss_of(model, 5, rank).backward()
        sent = meter.take()
    assert state.stats()["step"] == hook.stats()["step"] == 4
    assert 0 < sent <= state.stats()["wire_bytes"]  # earlier gathers are not in `sent`
    by_rank = plain_gradients(Net(), weights, [(5, r) for r in range(4)])
    require_close(gradients(model), by_rank, format="int4")
    state.close()
    hook.close()
