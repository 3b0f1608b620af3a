"""The cost of a step: launches, copies, collectives, bucket plans and profiler spans."""

import itertools
import operator
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bench.faked_ranks import faked_collectives
from dct_parallel import DCTState
from dct_parallel.exchange.bucket import Bucket
from dct_parallel.exchange.results import StepResults, run_now
from support.launches import Launches, stated
from support.ranks import Dictated, ddp, hooked, mlp, on_ranks, train

# CUDA launches of torch's ops for small contiguous tensors. The docs list the launches of our ops.
TORCH = dict.fromkeys(("cat", "gather", "index_fill_", "scatter_"), Launches(1, 0))
TORCH |= dict.fromkeys(("zero_", "ne", "masked_fill_", "sum", "mul_", "maximum"), Launches(1, 0))
COPIES = ("copy_", "to")
COLLECTIVES = ("_allgather_base_", "allgather_into_tensor_coalesced_", "alltoall_base_")
NOTHING = {
    *("view", "slice", "select", "split_with_sizes", "unsqueeze", "expand", "detach", "alias"),
    *("empty", "new_empty", "empty_like", "_record_function_enter_new", "_record_function_exit"),
    *("narrow", "_record_function_exit._RecordFunction"),
}


class Counted(TorchDispatchMode):
    """Counts calls and bytes of tensors of each op by name, without namespace and overload."""

    def __init__(self):
        super().__init__()
        self.calls, self.nbytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function._opname] += 1
        result = function(*args, **(kwargs or {}))
        if function._opname not in NOTHING:
            tensors = (*args, *(kwargs or {}).values(), result)
            nbytes = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
            self.nbytes[function._opname] += nbytes
        return result

    def launches(self):
        """Return (kernels, memsets, device copies, collectives)."""
        launches = TORCH | stated()
        kernels = memsets = copies = collectives = 0
        for name, times in self.calls.items():
            if name in launches:
                kernels += times * launches[name].kernels
                memsets += times * launches[name].memsets
            elif name in COPIES:
                copies += times
            elif name in COLLECTIVES:
                collectives += times
            else:
                assert name in NOTHING | {"randn"}, name
        return kernels, memsets, copies, collectives


def _bucket(sizes, scaled, transport):
    """Return (kernels, memsets, device copies, collectives) of one exchange of a bucket."""
    model = DDP(Dictated(sizes))
    state = DCTState(model, density=0.01, transport=transport)
    plan = state._buckets.plans()[0]
    bucket = Bucket(plan, state._topology.between, torch.device("cpu"), 0, {})
    numel = sum(sizes)
    scale = torch.full((1,), 8.0) if scaled else None
    inverse = None if scale is None else 1 / scale
    bucket.reduce(torch.randn(numel), scale, inverse)
    with Counted() as counted:
        bucket.reduce(torch.randn(numel), scale, inverse)
        assert StepResults({"": bucket}, run_now).read()[""].damaged == []
    return counted.launches()


@on_ranks(2)
def test_kernels_memsets_copies_and_collectives_per_bucket(rank):
    """A scaler does not change the counts. reduce_scatter packs, sums, packs again and unpacks."""
    for sizes, scaled in itertools.product(([5000, 30_000], [100, 30]), (False, True)):
        assert _bucket(sizes, scaled, "all_gather") == (5, 1, 0, 1)
        # Rank 1 owns nothing of the small bucket.
        owns_nothing = rank == 1 and sizes == [100, 30]
        expected = (8, 1, 0, 2) if owns_nothing else (9, 2, 0, 2)
        assert _bucket(sizes, scaled, "reduce_scatter") == expected
    # Rank 0 owns 4 of 7 blocks, and rank 1 owns 3. Rank 1's range is copied into contiguous memory.
    expected = (9, 2, 0, 2), (10, 2, 2, 2)
    assert _bucket([100_000], False, "reduce_scatter") == expected[rank]


@pytest.mark.parametrize("ranks, most_bytes", [(2, 14.25), (8, 11.15), (64, 10.27)])
def test_launches_and_bytes_of_a_module_between_shards(one_rank, ranks, most_bytes):
    """A step gathers the weights twice. Bytes per parameter include headers, but not transfers."""
    expected = {64: ((4, 1, 0, 0), (4, 1, 0, 0)), 63: ((10, 1, 0, 0), (12, 1, 1, 0))}
    for features, launches in expected.items():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        module = fully_shard(nn.Linear(512, features, features == 63), mp_policy=policy)
        numel = sum(p.numel() for p in module.parameters())
        part, whole = (torch.zeros(n * numel, dtype=torch.bfloat16) for n in (1, ranks))
        with faked_collectives(module, ranks) as (gather, reduce):
            gather(whole, part, None)  # the first call makes the layout of messages
            with Counted() as gathered:
                gather(whole, part, None)
            with Counted() as reduced:
                reduce(part, whole, None, dist.ReduceOp.AVG)
        assert (gathered.launches(), reduced.launches()) == launches
        if features == 63:  # 2 bytes of padding per message, counted as argument and as result
            assert (gathered.nbytes["zero_"], reduced.nbytes["zero_"]) == (4, 4 * ranks)
        else:
            nbytes = 2 * gathered.nbytes.total() + reduced.nbytes.total()
            assert most_bytes - 0.1 < nbytes / (ranks * numel) < most_bytes


@on_ranks(2)
def test_bucket_plans_are_made_once(rank):
    """Plans are made only when DDP builds or rebuilds its buckets."""
    model, state = hooked(ddp(mlp(depth=6)), density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, rank, range(3))
    plans = state._buckets.plans()
    train(model, optimizer, rank, range(3, 6))
    assert len(plans) >= 3 and all(map(operator.is_, plans, state._buckets.plans()))


@on_ranks(2)
def test_profiler_shows_a_span_per_phase(rank):
    model, _ = hooked(ddp(mlp()), density=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
        train(model, optimizer, rank, range(5))
    buckets = len(model._comm_hooks[0][1]._buckets.in_order())
    averages = {event.key: event.count for event in profiler.key_averages()}
    phases = {name: averages[f"dct::{name}"] for name in ("pack", "exchange", "unpack")}
    assert phases == dict.fromkeys(phases, 3 * buckets)  # 2 of the 5 steps are dense
    assert averages["dct::read_back"] == 3
    assert averages["dct::exchange_dense"] >= 2
    assert averages["dct::wait"] == 2  # passes that follow a compressed pass wait at the end
