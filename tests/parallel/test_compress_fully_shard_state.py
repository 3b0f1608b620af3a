"""compress_fully_shard: bytes, checkpoints, and the combination with dct_fully_shard_hook."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dct_parallel import compress_fully_shard, dct_fully_shard_hook
from support.compressed_shards import (
    ROUNDING,
    Net,
    computed_weights,
    full_weights,
    gradients,
    loss_of,
    plain_gradients,
    require_close,
    sharded,
)
from support.ranks import assert_same, on_ranks, run_ranks, shard_mesh, through_a_file
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


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_reported_bytes_match_the_meter(rank, ranks):
    formats = [None, "float32", "bfloat16", "int8", "int4"]
    for policy in POLICIES:
        totals = []
        for format in formats:
            for reshards in (False, True):
                model = sharded(reshard_after_forward=reshards, mp_policy=policy)
                model.blocks[0].norm.requires_grad_(False)
                state = compress_fully_shard(model, weights=format, gradients=format)
                assert state.stats() == {"step": 0, "wire_bytes": None}
                _train(model, rank, [0])
                with WireMeter() as meter:
                    _train(model, rank, [1])
                    sent = meter.take()
                gather, reduce = _row(state.plan(), "total")
                # After resharding, the backward pass gathers the weights again, except in int4.
                again = reshards and format != "int4"
                assert sent == state.stats()["wire_bytes"] == gather * (1 + again) + reduce
            totals.append((gather, reduce))
        dtype, sums = policy.param_dtype or torch.float32, policy.reduce_dtype or policy.param_dtype
        numel = sum(p.numel() for p in model.parameters()) * (ranks - 1) / ranks
        torch_bytes = numel * dtype.itemsize, numel * (sums or dtype).itemsize
        assert totals[0] == totals[1]
        assert all(0.98 < a / b < 1.05 for a, b in zip(totals[0], torch_bytes, strict=True))
        for (gathered, reduced), bits in zip(totals[2:], (16, 8.25, 4.25), strict=True):
            cases = (gathered, torch_bytes[0], False), (reduced, torch_bytes[1], True)
            for found, uncompressed, is_sum in cases:
                if bits == 16 and uncompressed == 2 * numel and not is_sum:
                    assert found == totals[0][0]  # torch sends bfloat16 itself
                else:  # allows for small parameters, headers, and padding to 1,024 entries
                    expected, padding = numel * bits / 8, 3 * (ranks - 1) * 1024 * bits / 8
                    assert 0.98 * expected < found < expected + padding + 2500, bits
        lines = state.plan().splitlines()
        kept = (ranks + 1) * sum(-(-len(p) // ranks) * p[0].numel() for p in model.parameters())
        assert lines[-1] == (
            f"Every rank keeps the weights of the last gather: {kept * dtype.itemsize:,} bytes."
        )
        dense = _row(state.plan(), "torch in bfloat16")
        assert dense[0] == 2 * kept // (ranks + 1) * (ranks - 1) > dense[1]


def _saver(how, folder, model, state):
    """Save the model and the state; return a function that loads them into another pair."""
    saved = {"model": model.state_dict(), "compressed": state.state_dict()}
    if how == "dcp":
        dcp.save(saved, checkpoint_id=folder)
    else:
        saved = through_a_file(saved, weights_only=False)  # DTensors

    def load(other, other_state):
        values = saved
        if how == "dcp":
            values = {"model": other.state_dict(), "compressed": other_state.state_dict()}
            dcp.load(values, checkpoint_id=folder)
        other.load_state_dict(values["model"])
        other_state.load_state_dict(values["compressed"])

    return load


@pytest.mark.parametrize("how", ["file", "dcp"])
def test_resumed_run_is_bitwise_equal(how, tmp_path):
    run_ranks(_resumed, 2, how, tmp_path)


def _resumed(rank, how, folder):
    shard_mesh(1, 2)  # silences warnings of DCP
    for format in ("int8", "int4"):
        for steps in (0, 3):
            for evaluates in (False, True):
                options = {"mp_policy": POLICIES[1] if evaluates else POLICIES[0]}
                model = sharded(**options)
                state = compress_fully_shard(model, weights=format, gradients=format)
                _train(model, rank, range(steps))
                if evaluates:
                    computed_weights(model)
                path = folder / f"{format}{steps}{evaluates}"
                load = _saver(how, path, model, state)
                other = sharded(**options)
                other_state = compress_fully_shard(other, weights=format, gradients=format)
                load(other, other_state)
                assert other_state.stats()["step"] == steps
                for step in range(4):
                    for each in (model, other):
                        _train(each, rank, [step])
                    assert torch.equal(*map(_flat, map(full_weights, (model, other))))
                    assert torch.equal(*map(_flat, map(computed_weights, (model, other))))
                    if step == 1:  # without the compressed state, int4 weights differ
                        anew = sharded(**options)
                        anew.load_state_dict(copy.deepcopy(model.state_dict()))
                        compress_fully_shard(anew, weights=format, gradients=format)
                        same = torch.equal(*map(_flat, map(computed_weights, (model, anew))))
                        assert same == (format == "int8")


def test_kept_weights_load_on_a_different_mesh(tmp_path):
    run_ranks(_resharded, 4, tmp_path)


def _resharded(rank, folder):
    mesh = shard_mesh()
    model = sharded(mesh=init_device_mesh("cpu", (4,)))
    state = compress_fully_shard(model, weights="int4", gradients="int4")
    _train(model, rank, range(3))
    kept = computed_weights(model)
    load = _saver("dcp", folder, model, state)
    refused = state.state_dict()

    other = sharded(mesh=mesh)
    other_state = compress_fully_shard(other, weights="int4", gradients="int4")
    load(other, other_state)
    found, exact = computed_weights(other), full_weights(other)
    assert torch.equal(_flat(exact), _flat(full_weights(model)))
    apart = max((kept[name] - exact[name]).abs().max() for name in exact)
    most = max((found[name] - exact[name]).abs().max() for name in exact)
    assert 0 < most <= ROUNDING["int4"] * apart + 1e-7  # changes start from the kept weights
    _train(other, rank, range(2))
    assert_same(_flat(computed_weights(other)))

    anew = sharded(mesh=mesh)
    anew_state = compress_fully_shard(anew, weights="int4", gradients="int4")
    anew.load_state_dict(copy.deepcopy(other.state_dict()))
    with pytest.raises(
        ValueError, match=r"kept of .* must be a .* DTensor of .*, sharded like the "
    ):
        anew_state.load_state_dict(refused)
    assert torch.equal(_flat(computed_weights(anew)), _flat(full_weights(anew)))


@on_ranks(2)
def test_invalid_states_change_nothing(rank):
    model = sharded()
    state = compress_fully_shard(model, weights="int4")
    _train(model, rank, range(2))
    good = state.state_dict()

    def refuses(text, error=ValueError, **changed):
        saved = changed.pop("saved", {**good, **changed})
        with pytest.raises(error, match=text):
            state.load_state_dict(saved)
        found = state.state_dict()
        assert found["step"] == 2 and found["run_id"] == good["run_id"]
        names = good["kept"]
        assert all(torch.equal(found["kept"][n].to_local(), names[n].to_local()) for n in names)

    refuses("state must be a dict, got list", TypeError, saved=[])
    refuses("version must be 6, as dct_kernels 0.3 saves it .*, got 5", version=5)
    refuses("kept must be a dict with strings as keys, got 0", kept=0)
    refuses("kept must be .*, got nothing", saved={n: v for n, v in good.items() if n != "kept"})
    refuses("step must be an integer in .*, got -1", step=-1)
    incomplete = {name: value for name, value in good["kept"].items() if name != "head.bias"}
    text = "kept must be the weights of this model, got a difference in head.bias"
    refuses(text, kept=incomplete)
    refuses(text, kept={**incomplete, "other": incomplete["head.weight"]})
    plain = {**good["kept"], "head.weight": torch.zeros(61, 70)}
    text = r"kept of head.weight must be a torch.float32 DTensor of \[61, 70\], sharded like the"
    refuses(text, kept=plain)
    refuses(text, kept={**good["kept"], "head.weight": good["kept"]["head.weight"].double()})
    refuses("step must be the same on every rank, got 2 on rank 0, 3 on rank 1", step=2 + rank)
    error, text = (ValueError, "version must be") if rank == 1 else (RuntimeError, "from rank 1")
    refuses(text, error, version=6 - rank)
    state.load_state_dict({**good, "weights": "int8"})  # a new format discards kept weights
    assert torch.equal(_flat(computed_weights(model)), _flat(full_weights(model)))


@pytest.mark.parametrize("format", ["int8", "int4"])
@on_ranks(4)
def test_combined_with_the_hook_between_replicas(rank, format):
    """Ranks 0 and 1 hold the shards of one replica. Ranks 2 and 3 hold the other replica."""
    mesh = shard_mesh()
    model = sharded(mesh=mesh["shard"])
    lossless = {"density": 1.0, "format": "float32", "start_step": 0}
    hook = dct_fully_shard_hook(model, mesh=mesh, **lossless)
    state = compress_fully_shard(model, weights=format, gradients=format)
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
    require_close(gradients(model), by_rank, format)
    state.close()
    hook.close()
