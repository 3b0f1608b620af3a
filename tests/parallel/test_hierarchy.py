"""A mesh of nodes: gradients cross whole inside a node, and compressed, in parts, between nodes."""

import copy
import itertools
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import DCTState, WireMeter, dct_hook, merge_states, node_mesh
from dct_parallel.data_parallel import gather, shard
from dct_parallel.data_parallel.bucket_plan import Slice
from dct_parallel.data_parallel.link import Cost, Link
from dct_parallel.data_parallel.node import Node
from ranks import Dictated, batch, entry, gathered, mlp, run_ranks, train_step, weights

# Several blocks, in which parts of two or four ranks cut through large parameters.
SIZES = (20_000, 100, 30_001)
ALL_SIZES = (SIZES, (1001, 30, 300, 255), (5, 3), (17,))  # and parts that are short, or empty
DENSE_LINK = Link(*[Cost(1.0, 0.0)] * 2, Cost(0.0, 0.0), 1.0, 1.0, 0.0)  # by which bf16 is best
TRANSPORTS = {
    "gather": {"transport": "gather"},
    "shard": {"transport": "shard"},
    "bf16": {"transport": "auto", "link": DENSE_LINK},
}


def _model(sizes, local_size, bucket_cap_mb=25, **options):
    model = DistributedDataParallel(Dictated(sizes), bucket_cap_mb=bucket_cap_mb)
    mesh = None if local_size is None else node_mesh(local_size, "cpu")
    state = DCTState(model, **{"density": 0.05, "mesh": mesh} | options)
    model.register_comm_hook(state, dct_hook)
    return model, state


def _integers(sizes, step, rank, limit=60):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-limit, limit + 1, (n,), generator=generator).float() for n in sizes]


def _step(model, grads):
    """The mean gradient, flat, once it is known to be the same on all ranks."""
    model.zero_grad()
    model(*grads).backward()
    mean = torch.cat([parameter.grad for parameter in model.module.p])
    assert all(torch.equal(mean, other) for other in gathered(mean))
    return mean


def _owed(state_dict):
    """What all ranks together owe to the mean of all gradients, flat, in float64."""
    own = entry(state_dict)
    nodes = own["world_size"] // own.get("local_size", 1)
    owed = torch.cat(
        [
            parts["residual"].double() / nodes
            + parts.get("owner_residual", torch.zeros(())).double()
            for parts in own["parameters"].values()
        ]
    )
    dist.all_reduce(owed)
    return owed


def _all(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def _density_one(rank):
    for transport, sizes in itertools.product(("gather", "shard"), ALL_SIZES):
        model, _ = _model(sizes, 2, transport=transport, density=1, value_dtype=torch.float32)
        for step in range(4):
            generator = torch.Generator().manual_seed(100 * step + rank)
            grads = [torch.randn(n, generator=generator) for n in sizes]
            mean, own = _step(model, grads), torch.cat(grads).double()
            if step >= 2:
                # One rounding inside the node and one between nodes, each of a sum of two; another
                # where an owner's residual takes part. Halving is exact.
                bound = 3 * 2**-24 * _all(own.abs()) / 4
                assert ((mean - _all(own) / 4).abs() <= bound).all(), (transport, sizes)


def test_at_density_one_it_is_the_mean():
    run_ranks(_density_one, 4)


def _conservation(rank, transport):
    """Integer gradients: sums, and means over a power of two, are exact."""
    ranks = dist.get_world_size()
    shapes = [(sizes, 2) for sizes in ALL_SIZES] + [(SIZES, 1), (SIZES, 4), (SIZES, None)]
    for sizes, local_size in shapes:
        model, state = _model(sizes, local_size, **TRANSPORTS[transport])
        applied, total = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
        for step in range(6):
            grads = _integers(sizes, step, rank)
            mean = _step(model, grads)
            if step >= 2:  # before, bfloat16 rounds
                applied += mean
                total += torch.cat(grads)
        left = _owed(state.state_dict())
        if transport != "bf16":
            assert torch.equal(applied + left, _all(total) / ranks), (sizes, local_size)
            assert bool(left.count_nonzero()) == (sum(sizes) > 256)
        held = [p["residual"] for p in entry(state.state_dict())["parameters"].values()]
        share = sum(residual.count_nonzero() for residual in held)
        assert share <= -(-sum(sizes) // (local_size or 1)) + 8
        state.close()


@pytest.mark.parametrize("transport", ["gather", "shard", "bf16"])
def test_what_was_applied_and_what_is_owed_is_every_gradient(transport):
    run_ranks(_conservation, 4, transport)


def _moved(rank, transport):
    """DDP deals its buckets anew after the first step, which was compressed already."""
    model, state = _model(SIZES, 2, 0.02, transport=transport, start_step=0)
    layouts, applied, total = set(), torch.zeros(sum(SIZES)), torch.zeros(sum(SIZES))
    for step in range(5):
        grads = _integers(SIZES, step, rank)
        applied += _step(model, grads)
        total += torch.cat(grads)
        layouts.add(tuple(bucket.plan.names for bucket in state._buckets.in_order()))
    assert torch.equal(applied + _owed(state.state_dict()), _all(total) / 4)
    return len(layouts)


@pytest.mark.parametrize("transport", ["gather", "shard"])
def test_what_is_owed_goes_to_whose_part_it_is_when_buckets_change(transport):
    assert run_ranks(_moved, 4, transport) == [2] * 4


def _flat_and_nodes_of_one(rank, transport):
    flat, state = _model(SIZES, None, transport=transport)
    nodes, parted = _model(SIZES, 1, transport=transport)
    for step in range(8):
        generator = torch.Generator().manual_seed(100 * step + rank)
        grads = [torch.randn(n, generator=generator) for n in SIZES]
        assert torch.equal(_step(flat, grads), _step(nodes, grads))
    ours, theirs = state.state_dict(), parted.state_dict()
    assert ours["version"] == theirs["version"]
    assert entry(ours).keys() == entry(theirs).keys()
    for name, parts in entry(ours)["parameters"].items():
        for key, value in parts.items():
            assert torch.equal(value, entry(theirs)["parameters"][name][key]), (name, key)
    assert state.plan() == parted.plan()


@pytest.mark.parametrize("transport", ["gather", "shard"])
def test_nodes_of_one_rank_are_as_no_mesh_bit_for_bit(transport):
    run_ranks(_flat_and_nodes_of_one, 2, transport)


def _learning(rank):
    model = DistributedDataParallel(mlp(width=96), bucket_cap_mb=0.05)
    state = DCTState(model, density=0.01, mesh=node_mesh(2, "cpu"))
    model.register_comm_hook(state, dct_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(60):
        losses.append(train_step(model, optimizer, *batch(step % 20, rank, width=96)).item())
        if step % 20 == 19:
            assert all(torch.equal(weights(model), other) for other in gathered(weights(model)))
    assert len(state._buckets.in_order()) >= 2
    return sum(losses[:20]), sum(losses[-20:])


def test_ranks_stay_bitwise_equal_and_learn():
    for first, last in run_ranks(_learning, 4):
        assert last < first


def _uneven(rank):
    """Ranks have 3 to 6 batches, of two passes each, of which only the second is exchanged."""
    model, state = _model(SIZES, 2, start_step=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total = torch.zeros(sum(SIZES))
    with model.join():
        for step in range(3 + rank):
            first, second = (_integers(SIZES, step, rank + 4 * part, 8) for part in range(2))
            optimizer.zero_grad()
            with model.no_sync():
                model(*first).backward()
            model(*second).backward()
            optimizer.step()
            total += torch.cat(first) + torch.cat(second)
    assert all(torch.equal(weights(model), other) for other in gathered(weights(model)))
    assert torch.equal(_owed(state.state_dict()) - weights(model), _all(total) / 4)
    return state.step


def test_uneven_inputs_and_accumulation():
    assert run_ranks(_uneven, 4) == [6] * 4


def _counted(rank):
    """Bytes of a step between nodes, as the formula has them, and those without a mesh."""
    model, state = _model(SIZES, 2)
    groups = state._ranks.between, state._ranks.node.group
    for step in range(4):
        with WireMeter(groups[0]) as between, WireMeter(groups[1]) as inside:
            model(*_integers(SIZES, step, rank)).backward()
    counted = between.take()
    assert state.stats()["wire_bytes"] == counted
    plan = state.plan()
    assert f"of part {rank % 2} of 2 of every bucket" in plan
    assert f"this rank sends {inside.take():,} bytes" in plan
    flat = DCTState(DistributedDataParallel(Dictated(SIZES)), density=0.05)
    return counted, flat.stats()["wire_bytes"]


def test_bytes_between_nodes_are_a_part_of_those_without_a_mesh():
    for parted, flat in run_ranks(_counted, 4):
        # Of half the elements, to one rank instead of three.
        assert parted == pytest.approx(flat / 6, rel=0.05)


def _skipped(rank, transport, poisoned):
    """A GradScaler skips a step on all ranks, which take back what they sent."""
    scaler = torch.amp.GradScaler("cpu", 64.0)
    model, state = _model(SIZES, 2, grad_scaler=scaler, **TRANSPORTS[transport])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total, bad = torch.zeros(sum(SIZES)), None
    for step in range(6):
        before = weights(model)
        grads = _integers(SIZES, step, rank)
        own = torch.cat(grads)
        if step == 4:
            if rank == 3:
                for parameter, index in poisoned:
                    grads[parameter][index] = torch.inf
            bad = ~torch.cat(grads).isfinite()
            dist.all_reduce(bad := bad.int())
            if rank >= 2:  # of a node no rank's gradient counts there
                own = torch.where(bad > 0, 0.0, own)
            if transport == "bf16":  # which has no residual to keep the others in
                own = torch.zeros_like(own)
        optimizer.zero_grad()
        scaler.scale(model(*grads)).backward()
        scaler.step(optimizer)
        scaler.update()
        total += own
        assert torch.equal(weights(model), before) == (step == 4)
        assert all(torch.equal(weights(model), other) for other in gathered(weights(model)))
    left = _owed(state.state_dict())
    if transport == "bf16":
        assert left.count_nonzero() == 0
    elif transport == "gather":
        assert torch.equal(left - weights(model), _all(total) / 4)
    else:  # an owner takes back to rounding
        assert (left - weights(model) - _all(total) / 4).abs().max() < 1e-3
    return scaler.get_scale()


FIRST_PART, LAST_PART = [(2, 17)], [(0, 19_999)]  # DDP's order is from the last parameter on


@pytest.mark.parametrize(
    "transport, poisoned",
    [
        ("gather", FIRST_PART),
        ("gather", LAST_PART),
        ("shard", LAST_PART),
        ("bf16", FIRST_PART),
    ],
)
def test_a_step_that_overflows_in_one_part_is_skipped_and_taken_back_on_all(transport, poisoned):
    assert run_ranks(_skipped, 4, transport, poisoned) == [32.0] * 4


STEP = 4  # the one that is damaged


def _damage(module, name, is_victim, now):
    """Every first payload that arrives at a victim has a wrong magic in that step."""
    collective = getattr(module, name)

    def in_flight(output, *args, **kwargs):
        collective(output, *args, **kwargs)
        if now() == STEP and is_victim:
            output[-1, 0] ^= 0xFF

    setattr(module, name, in_flight)


def _damaged(rank, transport, victims):
    """How many steps after the damaged one this rank raises."""
    step = 0
    place = (gather, "all_gather") if transport == "gather" else (dist, "all_to_all_single")
    if transport == "result":
        place = (shard, "all_gather")
    _damage(*place, rank in victims, lambda: step)
    kind = "gather" if transport == "gather" else "shard"
    model, state = _model(SIZES, 2, 0.1, transport=kind)
    for step in range(STEP + 1):
        model.zero_grad()
        model(*_integers(SIZES, step, rank)).backward()
    for step in range(STEP + 1, STEP + 4):
        model.zero_grad()
        try:
            model(*_integers(SIZES, step, rank)).backward()
        except RuntimeError as error:
            assert "every payload" in str(error) and "must be intact" in str(error)
            if rank in victims:
                assert f"of step {STEP} " in str(error) and "status" in str(error), error
            else:  # of a node all ranks tell the others
                said = int(re.search(r"damage that rank (\d)", str(error))[1])
                assert said // 2 in {victim // 2 for victim in victims}, error
            break
    for ask in (state.stats, state.state_dict, state.close):
        with pytest.raises(RuntimeError, match="must be intact"):
            ask()
    gathered(torch.ones(1))  # the ranks still answer each other
    return step - STEP


@pytest.mark.parametrize(
    "transport, victims, raised",
    [
        # The victim's node knows at the next step, and tells the other in that.
        ("gather", (0,), [1, 1, 2, 2]),
        ("gather", (0, 3), [1, 1, 1, 1]),
        ("result", (3,), [2, 2, 1, 1]),
        # An owner says so in the same step, to its like; these tell their nodes.
        ("sum", (0,), [1, 1, 1, 1]),
    ],
)
def test_damage_between_nodes_raises_on_every_rank(transport, victims, raised):
    assert run_ranks(_damaged, 4, transport, victims) == raised


def _through_a_checkpoint(rank, folder, transport):
    """Bit for bit, by torch.save's dict and by DCP; a copy goes on as well."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of DCP itself
    model, state = _model(SIZES, 2, density=0.02, transport=transport)
    for step in range(9):
        if step == 6:
            saved = copy.deepcopy(state.state_dict())
            dcp.save({"dct": state}, checkpoint_id=folder)
            copied = copy.deepcopy(state)
        expected = _step(model, _integers(SIZES, step, rank))
    final = entry(state.state_dict())["parameters"]
    for way in ("dict", "dcp", "copy"):
        resumed, again = _model(SIZES, 2, density=0.02, transport=transport)
        _step(resumed, _integers(SIZES, 0, rank))  # DDP's buckets get their final order
        if way == "copy":
            resumed = DistributedDataParallel(Dictated(SIZES))
            again = copied
            again.bind(resumed)
            resumed.register_comm_hook(again, dct_hook)
        elif way == "dcp":
            dcp.load({"dct": again}, checkpoint_id=folder)
        else:
            again.load_state_dict(saved)
        for step in range(6, 9):
            got = _step(resumed, _integers(SIZES, step, rank))
        if way == "copy":  # whose first step has DDP's first buckets
            continue
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), way
        for name, parts in entry(again.state_dict())["parameters"].items():
            for key, value in parts.items():
                assert torch.equal(value, final[name][key]), (way, name, key)
    return sum(int(parts["residual"].count_nonzero()) for parts in final.values())


@pytest.mark.parametrize("transport", ["gather", "shard"])
def test_a_checkpoint_goes_on_bit_equal(transport, tmp_path):
    assert min(run_ranks(_through_a_checkpoint, 4, tmp_path / "dcp", transport)) > 1000


def _run(rank, steps, saved, silent, *cases):
    """[(mean gradients applied over `steps`, this rank's state after them)] of every case."""
    results = []
    for local_size, transport in cases:
        model, state = _model(SIZES, local_size, transport=transport, start_step=0)
        if saved is not None:
            state.load_state_dict(saved)
        applied = torch.zeros(sum(SIZES))
        for step in range(steps):
            grads = _integers(SIZES, step, rank)
            applied += _step(model, [0 * g if silent else g for g in grads])
        results.append((applied, state.state_dict(), _owed(state.state_dict())))
    return results


@pytest.mark.parametrize("local_size, transport", [(2, "gather"), (2, "shard"), (None, "shard")])
def test_what_is_owed_carries_over_to_other_nodes(local_size, transport):
    """4 ranks, as 2 nodes of 2 or without a mesh, to 2: two nodes, one node, and without."""
    results = run_ranks(_run, 4, 5, None, False, (local_size, transport))
    ((applied, _, owed),) = results[0]
    every = [torch.cat(_integers(SIZES, s, r)) for s in range(5) for r in range(4)]
    total = sum(grads.double() for grads in every) / 4
    assert torch.equal(applied + owed, total) and owed.count_nonzero() > 10_000
    merged = merge_states(state for ((_, state, _),) in results)
    assert merged["version"] == 2
    cases = [(2, "gather"), (1, "gather"), (None, "shard")]
    for later, _, left in run_ranks(_run, 2, 3, merged, True, *cases)[0]:
        assert torch.equal(applied + later + left, total)
        assert later.count_nonzero() > 0


def test_what_is_owed_carries_over_to_more_nodes():
    results = run_ranks(_run, 2, 5, None, False, (None, "gather"), (2, "shard"))
    every = [torch.cat(_integers(SIZES, s, r)) for s in range(5) for r in range(2)]
    total = sum(grads.double() for grads in every) / 2
    for case in range(2):
        merged = merge_states(result[case][1] for result in results)
        applied = results[0][case][0]
        ((later, _, left),) = run_ranks(_run, 4, 3, merged, True, (2, "gather"))[0]
        assert torch.equal(applied + later + left, total)


def _of_part(rank, residual, low, high, owned=None):
    parts = {"residual": torch.zeros(len(residual)), "threshold": torch.tensor(5.0)}
    parts["residual"][low:high] = residual[low:high]
    if owned is not None:
        parts["owner_residual"] = owned
    numbers = {"run_id": "a", "world_size": 4, "local_size": 2, "step": 5, "density": 0.1}
    version = 4 if owned is None else 5
    recent = {"recent": torch.full((100, 2), torch.nan, dtype=torch.float64)}
    entries = {str(rank): {**numbers, **recent, "parameters": {"p": parts}}}
    return {"version": version, "ranks": entries}


def test_merged_is_the_mean_of_what_nodes_owe():
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(2, 1000, generator=generator)
    owned = torch.randn(4, 1000, generator=generator)
    for owners in (False, True):
        states = [
            _of_part(rank, nodes[rank // 2], *part, owned[rank] if owners else None)
            for rank, part in enumerate([(0, 600), (600, 1000)] * 2)
        ]
        parts = entry(merge_states(states))["parameters"]["p"]
        expected = nodes.double().mean(0) + (owned.double().sum(0) if owners else 0)
        assert torch.equal(parts["residual"], expected.float())
        assert parts["threshold"] == 0 and parts["sample_next"] == 1  # parts are others' now
        assert "local_size" not in entry(merge_states(states))
    states[1]["ranks"]["1"]["local_size"] = 4
    with pytest.raises(ValueError, match="local_size must be the same on every rank"):
        merge_states(states)
    del states[0]["ranks"]["0"]["local_size"]
    with pytest.raises(
        ValueError, match="state must be with its local_size: load into a state with"
    ):
        merge_states(states[:1])


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_aligned_and_together_everything(numel, size):
    sizes = [numel // 3, 0, numel - numel // 3]
    covered = [[], [], []]
    for rank in range(size):
        node = Node()
        node.rank, node.size = rank, size
        for piece in node.slices(sizes):
            assert isinstance(piece, Slice) and piece.low < piece.high
            start = sum(sizes[: piece.index]) + piece.low
            assert piece.low == 0 or start % 8 == 0
            covered[piece.index] += range(piece.low, piece.high)
    assert covered == [list(range(n)) for n in sizes]


def _errors(rank):
    model = DistributedDataParallel(Dictated(SIZES))
    mesh = node_mesh(2, "cpu")
    assert mesh.mesh.tolist() == [[0, 1]] and mesh.mesh_dim_names == ("node", "local")
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for error, text, arguments in (
        (ValueError, "process_group must be None with a mesh", {"process_group": dist.group.WORLD}),
        (TypeError, "mesh must be a DeviceMesh, got int", {"mesh": 2}),
        (ValueError, r"mesh must be of dimensions \('node', 'local'\), got", {"mesh": other}),
    ):
        with pytest.raises(error, match=text):
            DCTState(model, **{"mesh": mesh} | arguments)
    with pytest.raises(ValueError, match=r"mesh must be the same on every rank, got \[\[0, 1\]\]"):
        DCTState(model, mesh=mesh if rank == 0 else None)
    group = dist.new_group([rank], use_local_synchronization=True)
    alone = DistributedDataParallel(Dictated(SIZES), process_group=group)
    with pytest.raises(ValueError, match=r"mesh must be of the ranks of ddp, \[\d\], got \[0, 1\]"):
        DCTState(alone, mesh=mesh)

    with pytest.raises(ValueError, match="local_size must be in"):
        node_mesh(3)
    with pytest.raises(ValueError, match="local_size must be the same on every rank, got 1 on ra"):
        node_mesh(1 + rank, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        with pytest.raises(ValueError, match="local_size must be given, or LOCAL_WORLD_SIZE set"):
            node_mesh()
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        assert node_mesh(device_type="cpu").shape == (1, 2)

    state, flat = DCTState(model, mesh=mesh), DCTState(model)
    saved, flat_saved = state.state_dict(), flat.state_dict()
    assert (saved["version"], flat_saved["version"]) == (4, 2)
    with pytest.raises(ValueError, match=r"local_size must be 1 as in this run .*, got 2"):
        flat.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"local_size must be 2 as in this run .*, got 1"):
        state.load_state_dict(flat_saved)


def test_wrong_meshes_and_states_are_named():
    run_ranks(_errors, 2)


def _other_nodes(rank):
    """Meshes of one shape, of which some have other ranks in a node."""
    model, mesh = DistributedDataParallel(Dictated(SIZES)), node_mesh(2, "cpu")
    across = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=mesh.mesh_dim_names)
    text = re.escape("got [[0, 1], [2, 3]] on rank 0, [[0, 2], [1, 3]] on rank 1")
    with pytest.raises(ValueError, match=text):
        DCTState(model, mesh=mesh if rank == 0 else across)
    # Torch numbers a group's ranks by their own: in the second node others than the mesh says.
    turned = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=mesh.mesh_dim_names)
    with pytest.raises(ValueError, match=r"mesh must be of ascending ranks .*, got \[\[0, 1\], "):
        DCTState(model, mesh=turned)


def test_nodes_are_of_the_same_ranks_for_all():
    run_ranks(_other_nodes, 4)


def _uneven_nodes(rank):
    with pytest.raises(ValueError, match="local_size must be a divisor of the number of ranks, 3"):
        node_mesh(2, "cpu")


def test_nodes_must_be_of_equal_size():
    run_ranks(_uneven_nodes, 3)
