"""Checks that dct_parallel gives the same results on GPU and CPU, and that dct_hook never syncs.

First runs one rank with NCCL, to execute the collectives of both transports. Then runs two ranks
with gloo on one GPU, because NCCL ranks cannot share a GPU. gloo copies messages through the host.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.gpu.common import forbid_syncs, gpu_backends, report
from dct_parallel import (
    DCTAverager,
    DCTState,
    RowFormat,
    all_to_all_rows,
    dct_fully_shard_hook,
    dct_hook,
)
from support.ranks import Dictated, run_ranks

SIZES = (70_000, 100, 300_000, 40_000)
STEPS, SCALE = 26, 8.0  # STEPS covers the dense first steps and the check of sent values
WIDTH = 96


def drawn(step: int, rank: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(size, generator=generator).to(device) for size in SIZES]


def ddp(rank: int, device: str, backend: str, transport: str, scaled: bool) -> list[Tensor]:
    """Run DDP with the hook. Return the gradients of each step, and the final residuals."""
    module, group = Dictated(SIZES).to(device), dist.new_group(backend=backend)
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.5)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=SCALE, enabled=scaled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given = {"grad_scaler": scaler, "optimizer": optimizer}
    state = DCTState(model, density=0.01, transport=transport, **given)
    model.register_comm_hook(state, dct_hook)
    got = []
    for step in range(STEPS):
        loss = scaler.scale(model(*drawn(step, rank, device)))
        with forbid_syncs() if backend == "nccl" and step > 4 else nullcontext():
            loss.backward()
        got += [p.grad.cpu().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    (entry,) = state.state_dict()["ranks"].values()
    got += [parts["residual"].cpu() for parts in entry["parameters"].values()]
    state.close()
    return got


def averager(rank: int, device: str, backend: str) -> list[Tensor]:
    """Run DCTAverager. Return the weights after averaging."""
    module, group = Dictated(SIZES).to(device), dist.new_group(backend=backend)
    averages = DCTAverager(module, density=0.1, period=2, process_group=group)
    for step in range(STEPS):
        with torch.no_grad():
            for p, change in zip(module.parameters(), drawn(step, rank, device), strict=True):
                p += change
        averages.average_parameters()
    return [p.detach().cpu() for p in module.parameters()]


def rows(rank: int, device: str, backend: str, format: str | RowFormat) -> list[Tensor]:
    """Exchange rows. Return the rows from the other ranks, and the gradient."""
    group, ranks = dist.new_group(backend=backend), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    splits = [5 + 3 * rank] * ranks
    x = torch.randn(sum(splits), WIDTH, generator=generator).to(device).requires_grad_()
    y = all_to_all_rows(x, splits, format=format, group=group)
    weights = torch.randn(y.shape, generator=generator).to(device)
    (grad,) = torch.autograd.grad(y, x, weights)
    return [y.detach().cpu(), grad.cpu()]


def fully_sharded(rank: int, device: str, backend: str) -> list[Tensor]:
    """Run FSDP2. Return the gradients of a model with integer weights, whose sums are exact."""
    if device == "cuda":
        torch.cuda.set_device(0)  # otherwise the mesh warns
    dist.destroy_process_group()  # the mesh uses the backend of the default group
    dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=1)
    mesh = DeviceMesh(device, [[0]], mesh_dim_names=("replicate", "shard"))
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200, bias=False), nn.Linear(200, 1, bias=False))
    for p in model.parameters():
        p.data = torch.randint(-8, 9, p.shape, generator=draw).float()
    fully_shard(model.to(device), mesh=mesh["shard"])
    state = dct_fully_shard_hook(model, mesh=mesh, density=0.05)
    got = []
    for _ in range(STEPS):
        model(torch.randint(-8, 9, (8, 300), generator=draw).float().to(device)).sum().backward()
        got += [p.grad.full_tensor().cpu() for p in model.parameters()]
        model.zero_grad()
    state.close()
    return got


def uses() -> Iterator[tuple[Callable[..., list[Tensor]], int, str]]:
    """Yield (function that runs on each rank, number of ranks, backend on the GPU)."""
    yield fully_sharded, 1, "nccl"
    for ranks, backend in ((1, "nccl"), (2, "gloo")):
        for transport, scaled in itertools.product(("all_gather", "reduce_scatter"), (False, True)):
            yield functools.partial(ddp, transport=transport, scaled=scaled), ranks, backend
        yield averager, ranks, backend
        for format in (RowFormat(density=0.1), "int4", "sign"):
            yield functools.partial(rows, format=format), ranks, backend


def name(use: Callable[..., object]) -> str:
    return f"{use.func.__name__} {use.keywords}" if hasattr(use, "func") else use.__name__


def main() -> None:
    gpu_backends()
    failures, done = [], 0
    for use, ranks, backend in uses():
        label = f"{name(use)}, {ranks} {backend}"
        try:
            on_cpu = run_ranks(use, ranks, "cpu", "gloo")
            on_gpu = run_ranks(use, ranks, "cuda", backend, timeout=60)
            pairs = zip(itertools.chain(*on_gpu), itertools.chain(*on_cpu), strict=True)
            wrong = sum(not torch.equal(gpu, cpu) for gpu, cpu in pairs)
            print(f"{label}: {wrong} tensors differ", flush=True)
            failures += [label] if wrong else []
            done += 1
        except RuntimeError as error:
            failures.append(label)
            print(f"{label}: {error}", flush=True)
    report(failures, f"{done} uses of dct_parallel give the same results on CUDA and CPU")


if __name__ == "__main__":
    main()
