"""compress_fully_shard: non-finite values, corrupted messages, killed ranks, and invalid calls."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from dct_parallel import compress_fully_shard
from dct_parallel.fsdp2 import collectives
from support.compressed_shards import Net, computed_weights, full_weights, loss_of, sharded
from support.ranks import assert_same, corrupting, mlp, on_ranks, refused, shard_mesh

# Formats of weights and gradients. Weights have no int4.
FORMATS = (("int8", "int8"), ("int8", "int4"), ("bfloat16", "bfloat16"))


def _step(model, step, rank, optimizer=None):
    model.zero_grad()
    loss_of(model, step, rank).backward()
    if optimizer is not None:
        optimizer.step()


@on_ranks(2)
def test_nonfinite_weight_reaches_every_rank_until_repaired(rank):
    for format, bad in (("int8", torch.nan), ("int8", torch.inf), ("bfloat16", torch.inf)):
        for name in ("blocks.1.linear.weight", "blocks.0.norm.bias"):
            model = sharded()
            compress_fully_shard(model, weights=format)
            _step(model, 0, rank, torch.optim.AdamW(model.parameters(), lr=1e-3))
            exact = full_weights(model)
            part = model.get_parameter(name).to_local().detach()
            if rank == 1:
                good = part.flatten()[3].clone()
                part.view(-1)[3] = bad
            for _ in range(2):
                found = computed_weights(model)
                quantized = name.endswith("weight") and format != "bfloat16"  # 64 share a scale
                assert 1 <= (~found[name].isfinite()).sum() <= (64 if quantized else 1)
                others = [weight for other, weight in found.items() if other != name]
                assert sum((~w.isfinite()).sum() for w in others) <= 64 * quantized
                assert_same(torch.stack([(~w.isfinite()).sum() for w in found.values()]))
            if rank == 1:
                part.view(-1)[3] = good
            found = computed_weights(model)
            assert all((found[n] - exact[n]).abs().max() < 0.02 for n in exact)
            assert_same(torch.cat([weight.flatten() for weight in found.values()]))


@on_ranks(2)
def test_scaler_skips_nonfinite_gradients(rank):
    for weights, gradients in FORMATS:
        model = sharded()
        state = compress_fully_shard(model, weights=weights, gradients=gradients)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            before = full_weights(model)
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            scaler.scale(loss * (float("inf") if (step, rank) == (2, 1) else 1)).backward()
            scaler.unscale_(optimizer)
            bad = [not p.grad.to_local().isfinite().all() for p in model.parameters()]
            assert all(bad) if step == 2 else not any(bad)
            scaler.step(optimizer)
            scaler.update()
            after = full_weights(model)
            assert all(torch.equal(after[n], before[n]) == (step == 2) for n in after)
        assert scaler.get_scale() == 2.0 and state.stats()["step"] == 4


def _corrupt(patch, module, name, call):
    """In call number `call`, rank 1 receives 0 as the first byte of rank 0's message."""
    calls = itertools.count()

    def change(output):
        if next(calls) == call and dist.get_rank() == 1:
            output[0, 0] = 0

    patch.setattr(module, name, corrupting(getattr(module, name), change))


def _module_of(name):
    return ".".join(name.split(".")[:2]) if name.startswith("blocks") else "(root)"


def _require_raised(state, model, rank, what, module):
    """Check that rank 1 raises at the end of the next step and in every later call."""
    if rank == 0:
        _step(model, 2, rank)
        state.close()
        return
    text = "every payload of step 1 must be intact, got status 1 from rank 0"
    text += f" in the {what} of {module}"
    for call in (lambda: _step(model, 2, rank), state.stats, state.close):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert f"{text}: load a checkpoint into a new state" in str(caught.value)


@on_ranks(2)
def test_corrupted_weight_message_adds_nothing(rank):
    for call, module in enumerate(("(root)", "blocks.0", "blocks.1")):
        model = sharded()
        state = compress_fully_shard(model)
        _step(model, 0, rank, torch.optim.AdamW(model.parameters(), lr=1e-3))
        with pytest.MonkeyPatch.context() as patch:
            _corrupt(patch, collectives, "all_gather", call)
            found = computed_weights(model)
        for name, weight in found.items():
            damaged = not weight[: -(-len(weight) // 2)].any()
            assert damaged == (rank == 1 and _module_of(name) == module), (name, module)
        _step(model, 1, rank)  # its results include the gathers above
        _require_raised(state, model, rank, "weights", module)


@on_ranks(2)
def test_corrupted_gradient_message_adds_nothing(rank):
    # FSDP2 reduces modules whose inputs have no gradient in a callback at the end of the pass.
    for call, module in enumerate(("blocks.1", "(root)", "blocks.0")):
        found = []
        for factor in (0, 1):  # rank 0 sends zeros, or a corrupted message
            model = sharded()
            state = compress_fully_shard(model)
            _step(model, 0, rank)
            model.zero_grad()
            with pytest.MonkeyPatch.context() as patch:
                if factor:
                    _corrupt(patch, dist, "all_to_all_single", call)
                (loss_of(model, 1, rank) * (1 if rank == 1 else factor)).backward()
            found.append([p.grad.to_local().clone() for p in model.parameters()])
        for (name, _), without, damaged in zip(model.named_parameters(), *found, strict=True):
            equal = torch.equal(without, damaged)
            assert equal == (rank == 1 and _module_of(name) == module), (name, module)
        _require_raised(state, model, rank, "gradients", module)


@on_ranks(4)
def test_ranks_compare_over_the_mesh_of_the_model(rank):
    """Models on two halves of the ranks have different formats. Replicas have the same formats."""
    mesh = shard_mesh()
    halves = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    model = sharded(mesh=halves[rank // 2])
    if rank < 2:  # the other half makes no call
        compress_fully_shard(model).close()
    dist.barrier()
    state = compress_fully_shard(model, gradients=("int8", "int4")[rank // 2])
    _step(model, 0, rank)
    assert state.stats()["step"] == 1
    model = sharded(mesh=mesh)
    text = "gradients must be the same on every rank, got int8 on rank"
    with pytest.raises(ValueError, match=text):
        compress_fully_shard(model, gradients=("int8", "int4")[rank // 2])
    with pytest.raises(ValueError if rank > 1 else RuntimeError, match=text):
        compress_fully_shard(model, gradients="int4" if rank == 3 else "int8")
    state = compress_fully_shard(model)
    _step(model, 0, rank)
    assert state.stats()["step"] == 1


@on_ranks(2)
def test_shards_that_run_different_modules_raise(rank):
    """The messages of the two modules differ in size."""
    model = sharded()
    compress_fully_shard(model)
    _step(model, 0, rank)
    text = "compress_fully_shard: every rank must run the same modules in the same order, got"
    with pytest.raises(RuntimeError, match=text):
        model.blocks[rank](torch.ones(8, (50, 71)[rank]))


@on_ranks(2)
def test_unsupported_models_and_arguments_raise(rank):
    mesh = shard_mesh(2, 1)

    def refuses(text, model, **options):
        refused(text, lambda: compress_fully_shard(model, **options))

    refuses("model must be a module that fully_shard was applied to", mlp())
    model = sharded()
    text = r"'bfloat16' or 'int8' \('int4' is only for gradients: use 'int8'\), got 'int4'"
    refuses(text, model, weights="int4")
    text = "gradients must be 'float32', 'bfloat16', 'int8' or 'int4', got 'ternary'"
    refuses(text, model, gradients="ternary")
    for changed in (nn.Linear(70, 62), nn.Linear(70, 61).requires_grad_(False)):
        different = Net()
        if rank == 1:
            different.head = changed
        text = "(model|trained) must be the same on every rank, got .* on rank 0, .* on rank 1"
        refuses(text, sharded(different))

    compressed = sharded()
    compress_fully_shard(compressed)
    text = r"model must have no custom collective on module \(root\) \(close the state that set it"
    refuses(text, compressed)
    together = Net()
    fully_shard([*together.blocks])
    text = r"all parameters that were wrapped together with module \(root\), got a part of them"
    refuses(text, together.blocks[0])
    extended = sharded()
    extended.blocks[0].linear.weight._local_tensor.fsdp_pre_all_gather = None
    text = "without fsdp_pre_all_gather, which defines their messages, got one in module blocks.0"
    refuses(text, extended)
    if not hasattr(_fsdp_common, "ShardPlacementResult"):  # before torch 2.13
        return
    other = _fsdp_common.FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0)
    elsewhere = _fsdp_common.ShardPlacementResult(Shard(0), other)
    several = fully_shard(
        mlp(depth=1),
        mesh=mesh["shard"],
        shard_placement_fn=lambda p: elsewhere if p.ndim == 1 else None,
    )
    text = r"model must have one parameter group in module \(root\) .*, got 2"
    refuses(text, several)
    replicated = replicate(Net(), mesh=mesh["replicate"])
    assert isinstance(replicated, FSDPModule)
    refuses(r"sharded by fully_shard, got module \(root\) that is", replicated)
