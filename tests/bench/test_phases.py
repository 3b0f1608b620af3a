"""The clock for the phases of a step, in bench.link."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from bench.network.phases import Phases
from ranks import run_ranks


def _check_phases(rank):
    model = torch.nn.Linear(8, 8)
    ddp = DDP(model)
    nap = 0.05

    def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        time.sleep(nap)  # packs
        dist.all_reduce(bucket.buffer())
        time.sleep(2 * nap)  # unpacks
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    with Phases() as phases:
        phases.watch(ddp)
        ddp.register_comm_hook(None, hook)
        start = time.perf_counter()
        ddp(torch.ones(1, 8)).sum().backward()
        seconds = time.perf_counter() - start
        split = phases.take(seconds)
        idle = phases.take(1.0)
    assert split["pack"] >= nap and split["unpack"] >= 2 * nap
    assert split["wire"] > 0
    assert abs(sum(split.values()) - seconds) < 1e-9
    assert idle == {"compute": 1.0, "pack": 0.0, "wire": 0.0, "unpack": 0.0}


def test_phases_are_told_apart_and_add_up_to_the_step():
    run_ranks(_check_phases, 2)


def test_phases_of_overlapping_and_separate_exchanges():
    """Packs until its first collective, unpacks for the rest, and counts no moment twice."""
    phases = Phases()
    # Ids cross; rows: packed in 1, on the wire for 2, unpacked in 1; twice the gradients' exchange,
    # the second while the first is on the wire; one without a collective.
    phases._ended["wire"] = [(0.0, 1.0), (3.0, 5.0), (11.0, 14.0), (13.0, 15.0)]
    phases._ended["exchange"] = [(2.0, 6.0), (10.0, 16.0), (12.0, 15.5), (18.0, 19.0)]
    split = phases.take(20.0)
    compute, pack, wire = 20 - 1 - 4 - 6 - 1, 1 + 1 + 1, 1 + 2 + 4
    assert split == {"compute": compute, "pack": pack, "wire": wire, "unpack": 2}
