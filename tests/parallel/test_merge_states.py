"""merge_states: the mean over ranks or nodes, and the states that it refuses."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dct_parallel import merge_states
from ranks import entry


def _state(rank, world_size=2, numel=3, **changes):
    own = torch.full((numel,), float(rank))
    parameters = {"p.0": {"residual": own, "owner_residual": ()}}
    numbers = {"run_id": "a", "world_size": world_size, "local_size": 1, "step": 5}
    own = {**numbers, "density": 0.1, "parameters": parameters, **changes}
    return {"version": 6, "ranks": {str(rank): own}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_merging_wants_every_rank_of_one_run_once(tmp_path):
    merged = merge_states(_state(rank) for rank in range(2))
    assert merged["ranks"]["mean"]["parameters"]["p.0"]["residual"].tolist() == [0.5] * 3
    for states, text in [
        ([], "states must be those of all ranks, got none"),
        ([_state(0)], "states must be those of all 2 ranks, got rank 0"),
        ([_state(0), _state(0)], "states must hold one state per rank, got a second of rank 0"),
        ([merged, merged], "states must hold one state per rank, got a merged one"),
        ([_state(0), _state(1, step=6)], "step must be the same .* 5 on rank 0, 6 on rank 1"),
        ([_state(0), _state(1, run_id="b")], "run_id must be the same .* a on rank 0, b on"),
        ([_state(0), _state(1, world_size=3)], "world_size must be the same .* 2 on rank 0, 3 on"),
        (
            [_state(0), _state(1, parameters={})],
            r"parameters must be the same .* p.0 \(residual, owner_residual\) on",
        ),
        ([_state(0), _state(1, numel=4)], r"residual of p.0 of rank 1 must be a float32 \[3\]"),
        ([_state(0), _state(1, step="5")], r"step of rank 1 must be an integer .*, got '5'"),
        ([{"version": 5}], r"version must be 6, .*, got 5"),
        ([{"version": 6}], "ranks must be a dict with strings as keys, got nothing"),
    ]:
        with pytest.raises(ValueError, match=f"dct::merge_states: {text}"):
            merge_states(states)
    dcp.save({"dct": _state(0, 1)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match=r"key must be the name of a state in .*, got 'other'"):
        merge_states(tmp_path, key="other")
    assert merge_states(tmp_path)["ranks"]["mean"]["step"] == 5
    for states, text in [
        (5, "states must be an iterable of all ranks' states, or a folder of them, got int"),
        ([5], "state must be a dict, got int"),
    ]:
        with pytest.raises(TypeError, match=f"dct::merge_states: {text}"):
            merge_states(states)


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
