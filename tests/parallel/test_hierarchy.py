"""A mesh of nodes: dense reduction inside a node, compressed exchange of parts between nodes."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_parallel import DCTState, node_mesh
from dct_parallel.ddp.node import Node
from dct_parallel.exchange.plan import Slice, step_bytes
from dct_parallel.groups import timeout_of
from support.nodes import SIZES, all_pending, meshed_model, meshed_state, rank_sum, same_step
from support.ranks import (
    Dictated,
    assert_same,
    integers,
    on_ranks,
    set_timeout,
    weights,
)
from wire_meter import WireMeter


@pytest.mark.parametrize("local_size", [None, 2])
@on_ranks(4)
def test_uneven_inputs_with_join_and_accumulation(rank, local_size):
    """Ranks have 3 to 6 batches of two passes. Only the second pass is exchanged."""
    model, state = meshed_model(SIZES, local_size, start_step=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total = torch.zeros(sum(SIZES))
    with model.join():
        for step in range(3 + rank):
            first, second = (integers(SIZES, step, rank + 4 * part, 8) for part in range(2))
            optimizer.zero_grad()
            with model.no_sync():
                model(*first).backward()
            model(*second).backward()
            optimizer.step()
            total += torch.cat(first) + torch.cat(second)
    assert_same(weights(model))
    assert torch.equal(all_pending(state.state_dict()) - weights(model), rank_sum(total) / 4)
    assert state.step == 6


@on_ranks(4)
def test_large_float16_gradients_do_not_overflow_inside_a_node(rank):
    """Ranks divide before they add, in a dense and in a compressed step."""
    model = DDP(Dictated(SIZES).half())
    meshed_state(model, 2, density=1, format="float32", start_step=1)
    for _ in range(2):
        mean = same_step(model, [torch.full((n,), 40_960.0, dtype=torch.float16) for n in SIZES])
        assert torch.equal(mean, torch.full_like(mean, 40_960.0))


@on_ranks(4)
def test_bytes_between_and_inside_nodes(rank):
    """Compare the bytes with `stats` and `plan`, and with a sixth of the bytes without a mesh."""
    model, state = meshed_model(SIZES, 2)
    groups = state._topology.between, state._topology.node.group
    for step in range(4):
        with WireMeter(groups[0]) as between, WireMeter(groups[1]) as inside:
            model(*integers(SIZES, step, rank)).backward()
    counted = between.take()
    assert state.stats()["wire_bytes"] == counted
    plan = state.plan()
    assert f"of part {rank % 2} of 2 of every bucket" in plan
    assert f"this rank sends {inside.take():,} bytes" in plan
    flat = step_bytes(DCTState(DDP(Dictated(SIZES)), density=0.05)._buckets.plans())
    # The factor is a sixth: half of the elements are sent, to one rank instead of three.
    assert counted == pytest.approx(flat / 6, rel=0.05)


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_slices_are_aligned_and_cover_everything(numel, size):
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


@on_ranks(2)
def test_invalid_meshes_and_states_raise(rank):
    model = DDP(Dictated(SIZES))
    mesh = node_mesh(2, "cpu")
    assert mesh.mesh.tolist() == [[0, 1]] and mesh.mesh_dim_names == ("node", "local")
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    names = r"\('node', 'local'\)"
    for error, text, arguments in (
        (ValueError, "process_group must be None with a mesh", {"process_group": dist.group.WORLD}),
        (ValueError, rf"have dimensions {names} \(mesh_dim_names={names}\), got", {"mesh": other}),
    ):
        with pytest.raises(error, match=text):
            DCTState(model, **{"mesh": mesh} | arguments)
    with pytest.raises(ValueError, match=r"mesh must be the same on every rank, got \[\[0, 1\]\]"):
        DCTState(model, mesh=mesh if rank == 0 else None)
    group = dist.new_group([rank], use_local_synchronization=True)
    alone = DDP(Dictated(SIZES), process_group=group)
    with pytest.raises(ValueError, match=r"mesh must have the ranks of ddp, \[\d\], got \[0, 1\]"):
        DCTState(alone, mesh=mesh)

    with pytest.raises(ValueError, match="local_size must be the same on every rank, got 1 on ra"):
        node_mesh(1 + rank, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        with pytest.raises(ValueError, match="local_size must be given unless LOCAL_WORLD_SIZE is"):
            node_mesh()
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        assert node_mesh(device_type="cpu").shape == (1, 2)

    state, flat = DCTState(model, mesh=mesh), DCTState(model)
    saved, flat_saved = state.state_dict(), flat.state_dict()
    with pytest.raises(ValueError, match=r"local_size must be 1, as in this run .*, got 2"):
        flat.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"local_size must be 2, as in this run .*, got 1"):
        state.load_state_dict(flat_saved)


@on_ranks(4)
def test_different_ranks_per_node_raise(rank):
    """The meshes have the same shape, but their nodes contain different ranks."""
    model, mesh = DDP(Dictated(SIZES)), node_mesh(2, "cpu")
    across = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=mesh.mesh_dim_names)
    text = re.escape("got [[0, 1], [2, 3]] on rank 0, [[0, 2], [1, 3]] on rank 1")
    with pytest.raises(ValueError, match=text):
        DCTState(model, mesh=mesh if rank == 0 else across)
    # torch sorts the ranks of a group, so group ranks in the second node differ from the mesh.
    turned = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=mesh.mesh_dim_names)
    with pytest.raises(ValueError, match=r"mesh must have ascending ranks .*, got \[\[0, 1\], "):
        DCTState(model, mesh=turned)


@on_ranks(4)
def test_groups_have_the_shortest_timeout(rank):
    cpu, short = torch.device("cpu"), timedelta(seconds=50)

    def timeouts(mesh):
        """Return the timeouts of the mesh's groups, and of the groups that a state creates."""
        state = DCTState(DDP(Dictated(SIZES)), mesh=mesh)
        groups = [*mesh.get_all_groups(), state._topology.between, state.node_group]
        return [timeout_of(group, cpu) for group in groups]

    default = timeout_of(dist.new_group(), cpu)
    set_timeout(50)
    assert timeouts(node_mesh(2, "cpu")) == [short] * 4
    by_hand = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    assert timeouts(by_hand) == [default] * 2 + [short] * 2
    set_timeout(70)
    set_timeout(50, by_hand.get_group("local"))
    assert timeouts(by_hand) == [default, short, short, short]


@on_ranks(3)
def test_nodes_must_be_of_equal_size(rank):
    with pytest.raises(ValueError, match="local_size must be a divisor of the number of ranks, 3"):
        node_mesh(2, "cpu")
