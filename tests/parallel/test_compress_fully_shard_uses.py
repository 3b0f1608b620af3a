"""compress_fully_shard combined with other features of FSDP2.

The reference is an unsharded model that uses the gathered weights.
"""

import copy
import warnings
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from bench.faked_ranks import faked_collectives
from dct_parallel import compress_fully_shard, dct_fully_shard_hook
from dct_parallel.fsdp2 import collectives
from support.compressed_shards import (
    Net,
    computed_weights,
    fsdp_modules,
    full_weights,
    gradients,
    loss_of,
    plain_gradients,
    require_close,
    set_weights,
    sharded,
)
from support.ranks import assert_same, on_ranks, shard_mesh
from wire_meter import WireMeter


def _check_step(model, rank, ranks, plain=None, most=1e-5, factor=1.0, micro=1):
    """Run `micro` backward passes; compare the gradients with an unsharded model's gradients."""
    weights = computed_weights(model)
    for weight in weights.values():
        assert_same(weight)
    exact = full_weights(model)
    assert any(not torch.equal(w.to(exact[n].dtype), exact[n]) for n, w in weights.items())
    model.zero_grad()
    for step in range(micro):
        model.set_requires_gradient_sync(step == micro - 1)
        loss_of(model, step, rank).backward()
    found = gradients(model)
    batches = [(step, r) for r in range(ranks) for step in range(micro)]
    by_batch = plain_gradients(plain or Net(), weights, batches)
    by_rank = [
        {name: sum(grads[name] for grads in by_batch[r * micro :][:micro]) for name in by_batch[0]}
        for r in range(ranks)
    ]
    require_close(found, by_rank, most, factor)


@on_ranks(2)
def test_exports_are_exact(rank):
    """The weights that `unshard` gathers are rounded. `get_model_state_dict` gathers exact ones."""
    model = sharded()
    exact = full_weights(model)
    compress_fully_shard(model)
    for module in fsdp_modules(model):
        module.unshard()
    rounded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    exported = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert exported.keys() == exact.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in exact.items())
    assert not torch.equal(rounded["head.weight"], exact["head.weight"])


def _train(model, optimizer, rank, steps=2):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def _train_with_adamw(model, rank):
    _train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), rank)


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLOAT16 = MixedPrecisionPolicy(param_dtype=torch.float16)  # gradients are divided twice
ALL_BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # also reduces in bfloat16
# {name: (options of fully_shard, accumulated passes, relative error from dtypes and sums)}
VARIANTS = {
    "float32": ({}, 1, 1e-5),
    "bfloat16": ({"mp_policy": BFLOAT16}, 1, 1e-5),
    "bfloat16 reduced": ({"mp_policy": ALL_BFLOAT16}, 1, 2**-7),
    "float16": ({"mp_policy": FLOAT16}, 1, 2**-9),
    "kept gathered": ({"reshard_after_forward": False}, 1, 1e-5),
    "accumulated": ({}, 3, 1e-5),
    "offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 1, 1e-5),
}


@on_ranks(3)
def test_mixed_precision_accumulation_and_offloading(rank):
    for options, micro, most in VARIANTS.values():
        model = sharded(**options)
        state = compress_fully_shard(model)
        _train_with_adamw(model, rank)
        _check_step(model, rank, 3, most=most, micro=micro)
        assert state.stats()["step"] == 3


class _Checkpointed(Net):
    use_reentrant = False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x.requires_grad_(), use_reentrant=self.use_reentrant)
        return self.head(x)


class _Compiled(Net):
    """Each block is compiled separately. FSDP2's hooks run outside the compiled code."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class _Reentrant(_Checkpointed):
    use_reentrant = True


class _Encoding(Net):
    """Calls the blocks through another method, which is registered as a forward method."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.encode = block.forward

    def forward(self, x):
        for block in self.blocks:
            x = block.encode(x)
        return self.head(x)


def _registering(model):
    for block in model.blocks:
        register_fsdp_forward_method(block, "encode")


def _prefetching(model):
    first, second = model.blocks
    model.set_modules_to_forward_prefetch([first])
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])


def _asynchronous(model):
    def gather_all(*_):
        for module in fsdp_modules(model):
            module.unshard(async_op=True)

    for module in fsdp_modules(model):
        module._set_unshard_async_op(True)
    model.register_forward_pre_hook(gather_all, prepend=True)


@on_ranks(2)
def test_ways_to_run_a_model(rank):
    warnings.filterwarnings("ignore", message="The .grad attribute")  # raised by dynamo
    variants = [(kind(), None) for kind in (_Checkpointed, _Reentrant, _Compiled)]
    variants += [(Net(), _prefetching), (Net(), _asynchronous), (_Encoding(), _registering)]
    for model, prepare in variants:
        model = sharded(model)
        state = compress_fully_shard(model)
        if prepare is not None:
            prepare(model)
        _train_with_adamw(model, rank)
        _check_step(model, rank, 2)
        assert state.stats()["step"] == 3, type(model)


@on_ranks(2)
def test_every_gather_of_a_step_has_the_same_bits_on_all_ranks(rank):
    """Forward, backward, recomputed and evaluation passes gather weights."""
    logs, call = {}, collectives.WeightGather.__call__

    def recorded(gather, output_tensor, *args, **options):
        call(gather, output_tensor, *args, **options)
        logs.setdefault(gather, []).append(output_tensor.clone())

    collectives.WeightGather.__call__ = recorded
    for kind, weights, dtype in (
        *((Net, "int8", None), (Net, "bfloat16", None)),
        *((_Checkpointed, "int8", None), (_Reentrant, "int8", torch.bfloat16)),
    ):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        model = sharded(kind(), mp_policy=policy)
        state = compress_fully_shard(model, weights=weights)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            logs.clear()
            with torch.no_grad():
                loss_of(model, 10, 0)
            (loss_of(model, step, rank) + loss_of(model, step + 1, rank)).backward()
            with torch.inference_mode():
                loss_of(model, 10, 0)
            model.reshard()  # torch keeps the root gathered after an evaluation
            assert len(logs) == 3  # the root and two blocks
            for gathered in logs.values():
                assert len(gathered) > 1 and all(torch.equal(w, gathered[0]) for w in gathered)
                assert_same(gathered[0])
            optimizer.step()
            optimizer.zero_grad()
        assert state.stats()["step"] == 3


@on_ranks(4)
def test_hsdp_and_resharding_within_half_of_the_ranks(rank):
    """The second model reshards to 2 ranks, so the backward pass gathers within 2 of 4 ranks."""
    model = sharded(mesh=shard_mesh())
    compress_fully_shard(model)
    _train_with_adamw(model, rank)
    # Each rank's gradient is rounded before the sum over its replica's ranks.
    _check_step(model, rank, 4)
    model = sharded(mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)
    state = compress_fully_shard(model)
    _train_with_adamw(model, rank)
    _check_step(model, rank, 4)
    # As in torch, the backward pass receives half of the weights in float32 from one other rank.
    blocks = sum(4 * (inputs + 3) * outputs for inputs, outputs in ((50, 71), (71, 70)))
    assert state.stats()["wire_bytes"] > blocks / 2


@on_ranks(2)
def test_shards_of_columns(rank):
    """One weight is sharded by columns, which divide evenly. Other weights are sharded by rows."""
    by_columns = {"shard_placement_fn": lambda p: Shard(1) if p.shape == (71, 50) else None}
    model = sharded(**by_columns)
    assert model.blocks[0].linear.weight.placements == (Shard(1),)
    compress_fully_shard(model)
    _train_with_adamw(model, rank)
    _check_step(model, rank, 2)


class _Adapted(nn.Module):
    """A frozen bfloat16 layer with a trained low-rank adapter in float32."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(70, 70, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(70, 40, bias=False), nn.Linear(40, 70, bias=False)

    def forward(self, x):
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


class _WithAdapter(Net):
    def __init__(self):
        super().__init__()
        self.blocks.append(_Adapted())


@on_ranks(2)
def test_weights_of_several_dtypes_are_gathered_by_torch(rank):
    model = sharded(_WithAdapter())
    state = compress_fully_shard(model)
    assert "\nblocks.2: torch gathers its weights (several dtypes)." in state.plan()
    _train_with_adamw(model, rank)
    weights, exact = computed_weights(model), full_weights(model)
    adapter = [name for name in exact if name.startswith("blocks.2")]
    assert len(adapter) == 4 and all(torch.equal(weights[n], exact[n]) for n in adapter)
    model.zero_grad()
    loss_of(model, 0, rank).backward()
    plain = _WithAdapter()
    plain.load_state_dict(weights)
    expected = []
    for r in range(2):
        plain.zero_grad()
        loss_of(plain, 0, r).backward()
        named = plain.named_parameters()
        expected.append({n: p.grad.double() for n, p in named if p.grad is not None})
    require_close(gradients(model), expected)
    assert not any("base" in name for name in expected[0])


@on_ranks(2)
def test_frozen_and_unused_parameters(rank):
    model = sharded()
    state = compress_fully_shard(model)
    full_plan = state.plan()
    plain = Net()
    for each in (model, plain):
        each.blocks[0].linear.weight.requires_grad_(False)
        each.blocks[1].requires_grad_(False)
        each.head.bias.requires_grad_(False)
    assert state.plan() != full_plan
    _check_step(model, rank, 2, plain)
    model.requires_grad_(True)
    assert state.plan() == full_plan
    _check_step(model, rank, 2)

    class Part(Net):
        def forward(self, x):
            return self.blocks[0].linear(x)

    model = sharded(Part())
    compress_fully_shard(model)
    weights = computed_weights(model)
    x = torch.ones(4, 50)
    model.blocks[0].norm.forward = lambda x: x  # the norm's parameters get no gradient
    model.blocks[0](x).sum().backward()
    plain = Part()
    plain.load_state_dict(weights)
    plain.blocks[0].linear(x).tanh().sum().backward()
    found = model.blocks[0].linear.weight.grad.full_tensor()
    # torch reduces this module's gradients, because some of its parameters have none.
    torch.testing.assert_close(found, plain.blocks[0].linear.weight.grad)


@on_ranks(2)
def test_modules_wrapped_together_and_shared_parameters(rank):
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(70, 70)
            self.again = nn.Linear(70, 70)
            self.again.weight = self.head.weight

        def forward(self, x):
            return self.again(super().forward(x).tanh())

    model = Tied()
    fully_shard([*model.blocks])
    fully_shard(model)
    state = compress_fully_shard(model)
    rows = [line.split()[0] for line in state.plan().splitlines()]
    assert rows[2:4] == ["(root)", "blocks.0"]
    _train_with_adamw(model, rank)
    _check_step(model, rank, 2, Tied())
    assert state.stats()["step"] == 3


@on_ranks(2)
def test_models_that_change_after_the_call(rank):
    """Models are materialized, loaded, cast, or compressed again after close()."""
    with torch.device("meta"):
        model = Net()
    model = sharded(model)
    state = compress_fully_shard(model)
    float32_plan = state.plan()
    model.to_empty(device="cpu")
    set_weights(model, [p.detach() for p in Net().parameters()])
    assert state.plan() == float32_plan
    _train_with_adamw(model, rank)
    _check_step(model, rank, 2)

    for assign in (False, True):
        model.load_state_dict(copy.deepcopy(sharded().state_dict()), assign=assign)
        found, exact = computed_weights(model), dict(Net().named_parameters())
        tops = {name: weight.abs().max() for name, weight in exact.items()}
        assert all((found[n] - exact[n]).abs().max() <= 0.1 * tops[n] for n in exact)
        _check_step(model, rank, 2)

    state.close()
    found, exact = computed_weights(model), full_weights(model)
    assert all(torch.equal(found[name], exact[name]) for name in exact)
    state.close()
    again = compress_fully_shard(model)
    _train_with_adamw(model, rank)
    _check_step(model, rank, 2)
    assert again.stats()["step"] == 3

    model = sharded()
    state = compress_fully_shard(model)
    model.to(torch.bfloat16)
    assert state.plan() != float32_plan
    _train_with_adamw(model, rank)
    _check_step(model, rank, 2, most=2**-6)


@on_ranks(1)
def test_one_rank_matches_torch(rank):
    results = []
    for compressed in (False, True):
        model = sharded()
        if compressed:
            state = compress_fully_shard(model)
        _train_with_adamw(model, rank)
        results.append(torch.cat([w.flatten() for w in full_weights(model).values()]))
    assert torch.equal(*results)
    assert not state.stats()["wire_bytes"]


def test_status_of_prefetched_weights_stays_in_one_tensor(one_rank):
    """Explicit prefetch gathers on another stream. A freed tensor would belong to one stream."""
    part, whole = torch.zeros(520), torch.zeros(1040)
    with faked_collectives(fully_shard(nn.Linear(64, 8)), 2) as (gather, _):
        (status,) = gather.words
        damage = patch.object(collectives, "all_gather", lambda messages, *_: messages.zero_())
        with damage, torch.inference_mode():
            gather(whole, part, None)
        with patch.object(collectives, "all_gather", lambda messages, own, _: messages.copy_(own)):
            gather(whole, part, None)
    assert gather.words[0] is status
    assert status.tolist() == [1, 1]


def _row(plan, name):
    """Return the bytes of a gather and of a reduce-scatter from a row of the plan."""
    (line,) = (line for line in plan.splitlines() if line.startswith(name))
    return [int(cell.replace(",", "")) for cell in line.split()[-2:]]


@on_ranks(3)
def test_reported_bytes_match_the_meter(rank):
    for policy in (MixedPrecisionPolicy(), BFLOAT16, ALL_BFLOAT16):
        dtype = policy.param_dtype or torch.float32
        unchanged = 8 * dtype.itemsize, 8 * (policy.reduce_dtype or dtype).itemsize
        for weights, sums, *bits_of in (
            *((None, None, *unchanged), ("float32", "float32", *unchanged)),
            *(("bfloat16", "bfloat16", 16, 16), ("int8", "int8", 8.25, 8.25)),
            ("int8", "int4", 8.25, 4.25),
        ):
            for reshards in (False, True):
                model = sharded(reshard_after_forward=reshards, mp_policy=policy)
                model.blocks[0].norm.requires_grad_(False)
                state = compress_fully_shard(model, weights=weights, gradients=sums)
                assert state.stats() == {"step": 0, "wire_bytes": None}
                loss_of(model, 0, rank).backward()
                # Ranks compare the order of modules in a different group.
                with WireMeter(model.head.weight.device_mesh.get_group()) as meter:
                    loss_of(model, 1, rank).backward()
                    sent = meter.take()
                gather, reduce = _row(state.plan(), "total")
                # After resharding, the backward pass gathers the weights again.
                assert sent == state.stats()["wire_bytes"] == gather * (1 + reshards) + reduce
            entries = sum(p.numel() for p in model.parameters()) * 2 / 3
            for found, bits in zip((gather, reduce), bits_of, strict=True):
                expected, padding = entries * bits / 8, 3 * 2 * 1024 * bits / 8
                # Allows for vectors, headers, and padding to 1,024 entries.
                assert 0.98 * expected < found < expected + padding + 2500, bits
        shard = sum(-(-len(p) // 3) * p[0].numel() for p in model.parameters())
        dense = _row(state.plan(), "torch in bfloat16")
        assert dense[0] == 2 * shard * 2 > dense[1]


@on_ranks(4)
def test_combined_with_the_hook_between_replicas(rank):
    """Ranks 0 and 1 hold the shards of one replica. Ranks 2 and 3 hold the other replica."""
    mesh = shard_mesh()
    model = sharded(mesh=mesh["shard"])
    lossless = {"density": 1.0, "format": "float32", "start_step": 0}
    hook = dct_fully_shard_hook(model, mesh=mesh, **lossless)
    state = compress_fully_shard(model, gradients="int4")
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 3)
    weights = computed_weights(model)
    for weight in (*full_weights(model).values(), *weights.values()):
        assert_same(weight)
    model.zero_grad()
    loss_of(model, 5, rank).backward()
    assert state.stats()["step"] == hook.stats()["step"] == 4
    by_rank = plain_gradients(Net(), weights, [(5, r) for r in range(4)])
    require_close(gradients(model), by_rank, format="int4")
    state.close()
    hook.close()
