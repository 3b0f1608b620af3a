"""States of ranks in a mesh of nodes: saved, loaded, and merged for other nodes or none."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dct_parallel import merge_states
from nodes import SIZES, meshed_model, owed_by_all, same_step
from ranks import assert_same_parts, entry, integers, on_ranks, run_ranks


@pytest.mark.parametrize("transport", ["all_gather", "reduce_scatter"])
@on_ranks(4)
def test_a_checkpoint_goes_on_bit_equal(rank, transport, tmp_path):
    """Bit for bit, by torch.save's dict and by DCP."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of DCP itself
    model, state = meshed_model(SIZES, 2, density=0.02, transport=transport)
    for step in range(9):
        if step == 6:
            saved = copy.deepcopy(state.state_dict())
            dcp.save({"dct": state}, checkpoint_id=tmp_path)
        expected = same_step(model, integers(SIZES, step, rank))
    final = entry(state.state_dict())["parameters"]
    for way in ("dict", "dcp"):
        resumed, again = meshed_model(SIZES, 2, density=0.02, transport=transport)
        if way == "dcp":
            dcp.load({"dct": again}, checkpoint_id=tmp_path)
        else:
            again.load_state_dict(saved)
        for step in range(6, 9):
            got = same_step(resumed, integers(SIZES, step, rank))
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), way
        for name, parts in entry(again.state_dict())["parameters"].items():
            assert_same_parts(parts, final[name])
    assert sum(int(parts["residual"].count_nonzero()) for parts in final.values()) > 1000


def _run(rank, steps, saved, silent, *cases):
    """[(mean gradients applied over `steps`, this rank's state after them)] of every case."""
    results = []
    for local_size, transport in cases:
        model, state = meshed_model(SIZES, local_size, transport=transport, start_step=0)
        if saved is not None:
            state.load_state_dict(saved)
        applied = torch.zeros(sum(SIZES))
        for step in range(steps):
            grads = integers(SIZES, step, rank)
            applied += same_step(model, [0 * g if silent else g for g in grads])
        results.append((applied, state.state_dict(), owed_by_all(state.state_dict())))
    return results


@pytest.mark.parametrize(
    "local_size, transport", [(2, "all_gather"), (2, "reduce_scatter"), (None, "reduce_scatter")]
)
def test_what_is_owed_carries_over_to_other_nodes(local_size, transport):
    """4 ranks, as 2 nodes of 2 or without a mesh, to 2: two nodes, one node, and without."""
    results = run_ranks(_run, 4, 5, None, False, (local_size, transport))
    ((applied, _, owed),) = results[0]
    every = [torch.cat(integers(SIZES, s, r)) for s in range(5) for r in range(4)]
    total = sum(grads.double() for grads in every) / 4
    assert torch.equal(applied + owed, total) and owed.count_nonzero() > 10_000
    merged = merge_states(state for ((_, state, _),) in results)
    cases = [(2, "all_gather"), (1, "all_gather"), (None, "reduce_scatter")]
    for later, _, left in run_ranks(_run, 2, 3, merged, True, *cases)[0]:
        assert torch.equal(applied + later + left, total)
        assert later.count_nonzero() > 0


def test_what_is_owed_carries_over_to_more_nodes():
    results = run_ranks(_run, 2, 5, None, False, (None, "all_gather"), (2, "reduce_scatter"))
    every = [torch.cat(integers(SIZES, s, r)) for s in range(5) for r in range(2)]
    total = sum(grads.double() for grads in every) / 2
    for case in range(2):
        merged = merge_states(result[case][1] for result in results)
        applied = results[0][case][0]
        ((later, _, left),) = run_ranks(_run, 4, 3, merged, True, (2, "all_gather"))[0]
        assert torch.equal(applied + later + left, total)


def _of_part(rank, residual, low, high, *owned):
    parts = {"residual": torch.zeros(len(residual)), "owner_residual": owned}
    parts["residual"][low:high] = residual[low:high]
    numbers = {"run_id": "a", "world_size": 4, "local_size": 2, "step": 5, "density": 0.1}
    return {"version": 6, "ranks": {str(rank): {**numbers, "parameters": {"p": parts}}}}


def test_merged_is_the_mean_of_what_nodes_owe():
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(2, 1000, generator=generator)
    owned = torch.randn(4, 1000, generator=generator)
    for owners in (False, True):
        states = [
            _of_part(rank, nodes[rank // 2], *part, *owned[rank : rank + owners])
            for rank, part in enumerate([(0, 600), (600, 1000)] * 2)
        ]
        parts = entry(merge_states(states))["parameters"]["p"]
        expected = nodes.double().mean(0) + (owned.double().sum(0) if owners else 0)
        assert torch.equal(parts["residual"], expected.float())
        assert entry(merge_states(states))["local_size"] == 1
    states[1]["ranks"]["1"]["local_size"] = 4
    with pytest.raises(ValueError, match="local_size must be the same on every rank"):
        merge_states(states)
