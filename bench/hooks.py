"""Measures the host time of communication hooks per DDP bucket, and of `compress_fully_shard`."""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.cli import Parser, announce_backend, count, exit_status
from bench.faked_ranks import faked_collectives
from bench.tables import table
from dct_parallel import DCTState, dct_hook, process_group

DESCRIPTION = """\
Measure the host time that a communication hook adds to a step of DDP, per bucket.

The program uses one rank, gloo and one thread. The model has one bucket of 992 elements per layer,
so almost all of the time that a hook adds is host time. Hooks run in turns. A reported time is the
median step time minus the median step time of DDP without a hook, divided by the number of buckets.

The program also measures the time of compress_fully_shard per module and step: two gathers of
weights and one reduce-scatter of gradients. One rank packs and unpacks the messages of several
ranks, and sends nothing. The module has seven matrices and two vectors, 512 elements per rank. The
time is CPU time of one thread. Last, the program measures an all-reduce of 32 elements on gloo and
on the process group "dct", which sends such small tensors unchanged.
"""
HOOKS = {
    "none": None,
    "torch's allreduce_hook": default_hooks.allreduce_hook,
    "dct_hook, density 0.01": {"density": 0.01},
    "dct_hook, int4": {"format": "int4"},
}
WIDTH, WARM_UP = 31, 10  # a layer has 31 x 31 weights and 31 biases


def parser() -> Parser:
    parser = Parser(prog="python -m bench.hooks", description=DESCRIPTION)
    parser.add_argument("--buckets", type=count, default=16, help="number of buckets of each model")
    parser.add_argument("--steps", type=count, default=60, help="timed steps per hook")
    return parser


def make_ddp(hook: object, buckets: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(buckets)]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.003)
    if isinstance(hook, dict):
        ddp.register_comm_hook(DCTState(ddp, **hook), dct_hook)
    elif hook is not None:
        ddp.register_comm_hook(dist.group.WORLD, hook)
    return ddp


def added(buckets: int, steps: int) -> dict[str, float]:
    """Return {hook: microseconds per bucket that it adds to a step}."""
    models = {name: make_ddp(hook, buckets) for name, hook in HOOKS.items()}
    x, times = torch.randn(4, WIDTH), {name: [] for name in HOOKS}
    for step in range(WARM_UP + steps):
        for name, ddp in models.items():
            start = time.perf_counter()
            ddp(x).sum().backward()
            ddp.zero_grad()
            if step >= WARM_UP:
                times[name].append((time.perf_counter() - start) * 1e6 / buckets)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {name: medians[name] - medians["none"] for name in HOOKS if name != "none"}


def per_module(ranks: int, steps: int) -> str:
    """Return the microseconds of `compress_fully_shard` per module and step, on `ranks` ranks."""
    matrices = [torch.nn.Linear(8, 8, bias=False) for _ in range(7)]
    module = fully_shard(torch.nn.Sequential(*matrices, torch.nn.LayerNorm(32)))
    part, whole, times = torch.zeros(512), torch.zeros(ranks * 512), []
    with faked_collectives(module, ranks) as (gather, reduce):
        for _ in range(WARM_UP + steps):
            start = time.thread_time()
            for _ in range(2):
                gather(whole, part, None)
            reduce(part, whole, None, dist.ReduceOp.AVG)
            times.append((time.thread_time() - start) * 1e6)
    return f"{statistics.median(times[WARM_UP:]):.0f}"


def per_call(steps: int) -> dict[str, float]:
    """Return {backend: microseconds of an all-reduce that is too small to be compressed}."""
    groups, times = {"gloo": dist.group.WORLD, "dct": dist.new_group(backend="dct")}, {}
    groups["dct"]._settings = process_group._settings  # a group of one rank compresses nothing
    x = torch.ones(32)
    for _ in range(10 * (WARM_UP + steps)):
        for name, group in groups.items():
            start = time.perf_counter()
            dist.all_reduce(x, group=group)
            times.setdefault(name, []).append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def run(options: argparse.Namespace) -> None:
    announce_backend("cpu")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    result = added(options.buckets, options.steps)
    sharded = [[str(ranks), per_module(ranks, options.steps)] for ranks in (2, 8, 64)]
    calls = per_call(options.steps)
    dist.destroy_process_group()
    hooks = table(["hook", "us per bucket"], [[name, f"{us:.0f}"] for name, us in result.items()])
    groups = table(
        ["backend", "us per small all-reduce"], [[k, f"{v:.0f}"] for k, v in calls.items()]
    )
    print(hooks, table(["ranks of FSDP2", "us per module and step"], sharded), groups, sep="\n\n")


def main(given: Sequence[str] | None = None) -> int:
    return exit_status("hooks", lambda: run(parser().parse_args(given)))


if __name__ == "__main__":
    sys.exit(main())
