"""Every gradient is applied or pending, for several bucket layouts and after skipped steps.

Sums are exact unless noted, because gradients are small integers and means are over 2 or 4 ranks.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from support.entry_points import Hook, NodeMesh, Sharded
from support.nodes import ALL_SIZES, SIZES, TRANSPORTS, rank_sum
from support.ranks import assert_same, entry, integers, run_ranks

BLOCKS = (20_000, 100, 30_000)  # 4 blocks: with four owners, each owns one
ONE_BLOCK = (2_000, 30, 5_000)  # only rank 0 owns a block
THREE_BLOCKS = (40_000,)  # the last of four ranks owns nothing
OWNERS = {(2, BLOCKS): 2, (4, BLOCKS): 4, (2, ONE_BLOCK): 1, (4, THREE_BLOCKS): 3}


def _check_conservation(rank, make, cases):
    ranks = dist.get_world_size()
    for sizes, settings in cases:
        for transport in TRANSPORTS:
            settings = {"density": 0.05, "start_step": 0, **settings, "transport": transport}
            point, total, layouts = make(sizes, **settings), torch.zeros(sum(sizes)), []
            for step in range(8):
                numbers = torch.cat(integers(sizes, step, rank))
                assert_same(point.step(numbers))
                total += numbers
                if "bucket_cap_mb" in settings:
                    buckets = point.state._buckets.in_order()
                    layouts.append([bucket.plan.names for bucket in buckets])
            pending = point.pending()
            mean = rank_sum(total).double() / ranks
            assert torch.equal(point.applied + pending, mean), (sizes, settings)
            assert pending.any()
            assert not layouts or layouts[0] != layouts[-1]  # DDP rebuilds its buckets
            if make is Sharded:  # its state contains DTensors
                continue
            saved = entry(point.state.state_dict())["parameters"].values()
            held = sum(int(parts["residual"].count_nonzero()) for parts in saved)
            assert held <= -(-sum(sizes) // (point.local_size or 1)) + 8  # only this rank's part
            if make is Hook and transport == "reduce_scatter" and (ranks, sizes) in OWNERS:
                kept = sum(int(o.count_nonzero()) for p in saved for o in p["owner_residual"])
                assert (kept > 100) == (rank < OWNERS[ranks, sizes])


SMALL_BUCKETS = ((2000, 30, 5000, 255, 256, 70), {"bucket_cap_mb": 0.02})
FLOAT32 = {"format": "float32"}


@pytest.mark.parametrize(
    "make, ranks, cases",
    [
        (Hook, 2, [(BLOCKS, {}), (BLOCKS, {"start_step": 2}), (ONE_BLOCK, {}), SMALL_BUCKETS]),
        (Hook, 4, [(BLOCKS, FLOAT32), (THREE_BLOCKS, {})]),
        (NodeMesh, 4, [(sizes, {}) for sizes in ALL_SIZES]),
        (NodeMesh, 4, [(SIZES, {"local_size": 1}), (SIZES, {"local_size": 4})]),
        (NodeMesh, 4, [(SIZES, FLOAT32), (SIZES, SMALL_BUCKETS[1])]),
        # Of the tensors with one element, the second rank of a replica has only padding.
        (Sharded, 4, [(BLOCKS, {}), ((1, 20_001, 1, 301, 5000), {"format": "bfloat16"})]),
    ],
)
def test_every_gradient_is_applied_or_pending(make, ranks, cases):
    run_ranks(_check_conservation, ranks, make, cases)


PARAMETERS = (2000, 30, 5000, 20_000)  # the last parameter exceeds a block, so it has two owners
POISON = {  # positions at which the last rank's gradient is infinite
    "one": [2030 + 17],  # fits into the capacity
    "flood": list(range(2031, 7030)),  # exceeds the capacity
    "whole": [2003],  # in a parameter that is sent completely
    "last": [27_029],  # in the last part of a bucket
}
BAD_STEP = 5


def _check_skipped_step(rank, make, cases):
    ranks = dist.get_world_size()
    for transport, by_scaler, poison in cases:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=by_scaler)
        settings = {"start_step": 0, "transport": transport, "grad_scaler": scaler}
        point = make(PARAMETERS, density=0.05, **settings)
        total = torch.zeros(sum(PARAMETERS))
        for step in range(9):
            everyone = [torch.cat(integers(PARAMETERS, step, r)) for r in range(ranks)]
            if step == BAD_STEP:
                everyone[-1][POISON[poison]] = torch.inf
            before = point.weights()
            scaler.scale(point.loss(everyone[rank])).backward()
            if by_scaler:
                if step == BAD_STEP and poison == "flood":
                    point.state.take_back()  # the skipped step must not be taken back a second time
                scaler.step(point.optimizer)
                scaler.update()
            elif _norm(point).isfinite():
                point.optimizer.step()
            else:
                point.state.take_back()
                point.state.take_back()  # no effect
            assert torch.equal(point.weights(), before) == (step == BAD_STEP)
            size = point.local_size or 1  # infinity on one rank makes its node's mean infinite
            nodes = [torch.stack(everyone[r : r + size]).mean(0) for r in range(0, ranks, size)]
            total += torch.stack(nodes).nan_to_num(posinf=0).mean(0)
        assert_same(point.weights())
        off = (point.pending() - point.weights() - total).abs().max()
        # With nodes, take_back on an owner is exact only up to rounding.
        assert off <= (1e-3 if make is NodeMesh and transport == "reduce_scatter" else 0), poison
        assert scaler.get_scale() == (32.0 if by_scaler else 1.0)


def _norm(point):
    norm = clip_grad_norm_(point.model.parameters(), torch.inf)
    return norm.full_tensor() if isinstance(point, Sharded) else norm


GATHER, OWNERS_SUM = TRANSPORTS


@pytest.mark.parametrize(
    "make, ranks, cases",
    [
        (Hook, 2, [(GATHER, True, poison) for poison in POISON]),
        (Hook, 2, [(OWNERS_SUM, True, "one"), (OWNERS_SUM, True, "flood")]),
        (Hook, 2, [(GATHER, False, "flood"), (OWNERS_SUM, False, "flood")]),
        (NodeMesh, 4, [(GATHER, True, "one"), (GATHER, True, "last"), (OWNERS_SUM, True, "last")]),
        (NodeMesh, 4, [(GATHER, False, "flood")]),
        (Sharded, 4, [(GATHER, True, "last"), (GATHER, False, "one")]),
    ],
)
def test_skipped_step_loses_no_finite_gradient(make, ranks, cases):
    run_ranks(_check_skipped_step, ranks, make, cases)
