"""Checks that dct_parallel gives the same results on GPU and CPU, and that dct_hook never syncs.

First runs one rank with NCCL, to execute the collectives of both transports. Then runs two ranks
with gloo on one GPU, because NCCL ranks cannot share a GPU. gloo copies messages through the host.
Where torch or a GPU may add in any order, the numbers are integers, whose sums are exact.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.gpu.common import forbid_syncs, gpu_backends, report
from dct_embeddings import ReplicaSync, ShardedEmbeddingBags, plan_shards
from dct_parallel import (
    DCTAverager,
    DCTState,
    RowFormat,
    all_reduce_compressed,
    all_to_all_rows,
    compress_fully_shard,
    dct_fully_shard_hook,
    dct_hook,
    process_group,
)
from dct_parallel.collectives import all_gather, reduce_scatter
from dct_parallel.rows.reduce_scatter import reduce_scatter_rows_async
from dct_patches import WeightPublisher, WeightSubscriber
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


def mesh_of(device: str, replicas: int) -> DeviceMesh:
    """A mesh of all ranks, which share a GPU."""
    if device == "cuda":
        torch.cuda.set_device(0)  # otherwise the mesh warns
    ranks = torch.arange(dist.get_world_size()).view(replicas, -1)
    return DeviceMesh(device, ranks, mesh_dim_names=("replicate", "shard"))


def fully_sharded(rank: int, device: str, backend: str, compresses: bool) -> list[Tensor]:
    """Run FSDP2. Return the gradients, which are integers. int8 represents +-127 exactly."""
    if backend == "nccl":
        dist.destroy_process_group()  # the mesh uses the backend of the default group
        dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=1)
    mesh, draw = mesh_of(device, 1), torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Linear(300, 201, bias=False), nn.Linear(201, 40, bias=False))
    for p in model.parameters():
        p.data = torch.where(torch.arange(p.numel()).view(p.shape) % 3 > 0, 127.0, -127.0)
    for module in (*model.to(device), model):
        fully_shard(module, mesh=mesh["shard"])
    if compresses:
        state = compress_fully_shard(model, weights="int8", gradients="int4")
    else:
        state = dct_fully_shard_hook(model, mesh=mesh, density=0.05)
    got = []
    for _ in range(STEPS):
        model(torch.randint(-8, 9, (8, 300), generator=draw).float().to(device)).sum().backward()
        got += [p.grad.full_tensor().cpu() for p in model.parameters()]
        model.zero_grad()
    state.close()
    return got


def all_reduces(rank: int, device: str, backend: str) -> list[Tensor]:
    """Run pending all_reduce_compressed calls. Return the sums and the residuals."""
    residuals, got = [torch.zeros(size, device=device) for size in SIZES], []
    for step in range(STEPS):
        tensors = drawn(step, rank, device)
        pairs = zip(tensors, residuals, strict=True)
        works = [all_reduce_compressed(*pair, format="int4", async_op=True) for pair in pairs]
        assert all(work.wait() for work in works)
        got += [tensor.cpu() for tensor in tensors]
    return got + [residual.cpu() for residual in residuals]


def process_groups(rank: int, device: str, backend: str) -> list[Tensor]:
    """Run collectives of the process group "dct". Return their results."""
    with mock.patch("torch.distributed.is_nccl_available", return_value=backend == "nccl"):
        process_group.configure(min_bytes=1, gathers="int8")
        group = dist.new_group(backend=process_group.NAME)
    group._settings = process_group._settings  # a group of one rank compresses nothing
    got = []
    for x in drawn(0, rank, device):
        whole = x.new_empty(group.size() * x.numel())
        dist.all_reduce(x, group=group)
        all_gather(whole, x, group)
        reduce_scatter(x, whole, group)
        got += whole.cpu(), x.cpu()
    return got


def reduced_rows(rank: int, device: str, backend: str) -> list[Tensor]:
    """Sum rows over ranks as TorchRec does. On CUDA, start on one stream and wait on another."""
    other, got = torch.cuda.Stream() if device == "cuda" else None, []
    options = {"format": RowFormat("int8", backward="int4"), "group": dist.group.WORLD}
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(1000, WIDTH, generator=draw).to(device).requires_grad_()
        with torch.cuda.stream(other):
            pending = reduce_scatter_rows_async(x, [700, 300], **options)
        if other:
            torch.cuda._sleep(1_000_000)  # `wait` returns before its stream has read the rows
        y = pending.wait()
        with torch.cuda.stream(other):  # takes memory that was freed too early
            torch.full((2 * len(y), WIDTH), 77, dtype=torch.uint8, device=device)
        (grad,) = torch.autograd.grad(y, x, torch.randn(y.shape, generator=draw).to(device))
        got += [y.detach().cpu(), grad.cpu()]
    return got


def replicas(rank: int, device: str, backend: str) -> list[Tensor]:
    """Run ReplicaSync of embedding bags, with integer gradients. Return the weights."""
    tables = [torch.zeros(rows, 32, device=device) for rows in (500, 900)]
    bags = ShardedEmbeddingBags(tables, plan_shards([500, 900], 1), mesh_of(device, 2))
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    syncs = ReplicaSync(bags, optimizer=optimizer, every=2, density=0.1)
    draw = torch.Generator().manual_seed(rank)
    lengths = torch.ones(2, 64, dtype=torch.int64, device=device)
    for _ in range(8):
        ids = torch.randint(500, (128,), generator=draw).square() // 500
        weights = torch.randint(-8, 9, (64, 2, 32), generator=draw)
        (bags(ids.to(device), lengths) * weights.to(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        syncs.step()
    return [bags.weight.detach().cpu()]


def patches(rank: int, device: str, backend: str) -> list[Tensor]:
    """Publish changed weights and apply the patches. Return the weights of the subscriber."""
    weights = dict(zip("abcd", drawn(0, rank, device), strict=True))
    received = {name: torch.zeros_like(x, dtype=torch.bfloat16) for name, x in weights.items()}
    publisher, subscriber = WeightPublisher(weights), WeightSubscriber(received)
    subscriber.load(publisher.full())
    for x in weights.values():
        x[x > 1.5] *= 1 + 2**-7
    subscriber.apply(publisher.diff(weights))
    return [x.cpu() for x in received.values()]


def uses() -> Iterator[tuple[Callable[..., list[Tensor]], int, str]]:
    """Yield (function that runs on each rank, number of ranks, backend on the GPU)."""
    yield functools.partial(fully_sharded, compresses=False), 1, "nccl"
    yield functools.partial(fully_sharded, compresses=True), 2, "gloo"
    for ranks, backend in ((1, "nccl"), (2, "gloo")):
        for transport, scaled in itertools.product(("all_gather", "reduce_scatter"), (False, True)):
            yield functools.partial(ddp, transport=transport, scaled=scaled), ranks, backend
        yield averager, ranks, backend
        yield process_groups, ranks, backend
        for format in (RowFormat(density=0.1), "int4", "sign"):
            yield functools.partial(rows, format=format), ranks, backend
    for use in (all_reduces, reduced_rows, replicas, patches):
        yield use, 2, "gloo"


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
