"""The layer on CUDA tensors: results are those on the CPU, and no hook waits for the GPU.

    python bench/gpu/layer.py

One rank with NCCL, for which every transport runs its collectives; and two ranks with gloo, which
copies what they exchange through the host, on one GPU: NCCL refuses to share it.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from common import ROOT, report
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "parallel")]

from dct_parallel import DCTAverager, DCTState, all_to_all_rows, dct_fully_shard_hook, dct_hook
from ranks import Dictated, run_ranks

SIZES = (70_000, 100, 300_000, 40_000)
STEPS, SCALE = 26, 8.0  # in the 23rd compressed one it is looked at what was sent
WIDTH = 96


@contextlib.contextmanager
def not_waiting(backend: str) -> Iterator[None]:
    """An error where torch is asked to wait for the GPU."""
    if backend == "nccl":
        with warnings.catch_warnings():  # that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
    yield
    if backend == "nccl":
        torch.cuda.set_sync_debug_mode("default")


def drawn(step: int, rank: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(size, generator=generator).to(device) for size in SIZES]


def ddp(rank: int, device: str, backend: str, transport: str, scaled: bool) -> list[Tensor]:
    """The gradients of every step, and what is owed at the end."""
    module = Dictated(SIZES).to(device)
    group = dist.new_group(backend=backend)
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.5)
    scaler = torch.amp.GradScaler(device, init_scale=SCALE) if scaled else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = DCTState(model, density=0.01, transport=transport, grad_scaler=scaler)
    model.register_comm_hook(state, dct_hook)
    got = []
    for step in range(STEPS):
        loss = model(*drawn(step, rank, device))
        loss = loss if scaler is None else scaler.scale(loss)
        with not_waiting(backend) if step > 4 else contextlib.nullcontext():
            loss.backward()
        got += [p.grad.cpu().clone() for p in model.parameters()]
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    (entry,) = state.state_dict()["ranks"].values()
    got += [parts["residual"].cpu() for parts in entry["parameters"].values()]
    state.close()
    return got


def averager(rank: int, device: str, backend: str, overlap: int) -> list[Tensor]:
    """Weights after averages of what each rank added to its own; an exchange that begins and does
    not arrive in the same step waits for nothing."""
    module = Dictated(SIZES).to(device)
    group = dist.new_group(backend=backend)
    averages = DCTAverager(module, density=0.1, period=2, process_group=group, overlap=overlap)
    for step in range(STEPS):
        with torch.no_grad():
            for p, change in zip(module.parameters(), drawn(step, rank, device), strict=True):
                p += change
        begins = overlap and step > 4 and step % 2
        with not_waiting(backend) if begins else contextlib.nullcontext():
            averages.average_parameters()
    return [p.detach().cpu() for p in module.parameters()]


def rows(rank: int, device: str, backend: str, format: str) -> list[Tensor]:
    """What arrives from the other ranks, and the gradient that comes back."""
    group, ranks = dist.new_group(backend=backend), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    splits = [5 + 3 * rank] * ranks
    x = torch.randn(sum(splits), WIDTH, generator=generator).to(device).requires_grad_()
    how = {"density": 0.1} if format == "dct" else {"forward": format, "backward": format}
    y = all_to_all_rows(x, splits, group=group, **how)
    weights = torch.randn(y.shape, generator=generator).to(device)
    (grad,) = torch.autograd.grad(y, x, weights)
    return [y.detach().cpu(), grad.cpu()]


def fully_sharded(rank: int, device: str, backend: str) -> list[Tensor]:
    """FSDP2's gradients, each drawn by an exact linear model."""
    dist.destroy_process_group()  # the mesh makes its groups of the default one's backend
    dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=1)
    mesh = DeviceMesh(device, [[0]], mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200, bias=False), nn.Linear(200, 1, bias=False)).to(device)
    fully_shard(model, mesh=mesh["shard"])
    state = dct_fully_shard_hook(model, mesh, density=0.05)
    got = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 300, generator=generator).to(device)
        model(x).sum().backward()
        got += [p.grad.full_tensor().cpu() for p in model.parameters()]
        model.zero_grad()
    state.close()
    return got


def differing(on_gpu: list[list[Tensor]], on_cpu: list[list[Tensor]], exact: bool) -> int:
    """How many tensors differ: at all, or, where matrix products differ, beyond their rounding."""
    pairs = [
        pair for ranks in zip(on_gpu, on_cpu, strict=True) for pair in zip(*ranks, strict=True)
    ]
    if exact:
        return sum(not torch.equal(gpu, cpu) for gpu, cpu in pairs)
    # An entry beside the threshold may be sent on one device and wait on the other.
    return sum(
        (~torch.isclose(gpu, cpu, rtol=1e-3, atol=1e-5)).float().mean().item() > 1e-3
        for gpu, cpu in pairs
    )


def cases() -> Iterator[tuple[str, Callable[..., list[Tensor]], int, str, bool]]:
    """(what, function, ranks, the backend on the GPU, whether all bits must agree)."""
    for ranks, backend in ((1, "nccl"), (2, "gloo")):
        for transport in ("all_gather", "reduce_scatter"):
            for scaled in (False, True):
                name = f"DDP {transport}{', scaled' if scaled else ''}"
                yield (
                    name,
                    functools.partial(ddp, transport=transport, scaled=scaled),
                    ranks,
                    backend,
                    True,
                )
        for overlap in (0, 1):
            name = f"DCTAverager, overlap {overlap}"
            yield name, functools.partial(averager, overlap=overlap), ranks, backend, True
        for format in ("dct", "int4", "ternary"):
            yield f"rows {format}", functools.partial(rows, format=format), ranks, backend, True
    yield "FSDP2", fully_sharded, 1, "nccl", False


def run(
    rank: int, function: Callable[..., list[Tensor]], device: str, backend: str
) -> list[Tensor]:
    if device == "cuda":
        torch.cuda.set_device(0)
    return function(rank, device=device, backend=backend)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is False")
    failures, done = [], 0
    for name, function, ranks, backend, exact in cases():
        label = f"{name}, {ranks} {backend}"
        try:
            on_cpu = run_ranks(run, ranks, function, "cpu", "gloo")
            on_gpu = run_ranks(run, ranks, function, "cuda", backend, timeout=60)
            wrong = differing(on_gpu, on_cpu, exact)
            print(f"{label}: {wrong} of {sum(map(len, on_gpu))} tensors differ", flush=True)
            failures += [label] if wrong else []
            done += 1
        except RuntimeError as error:
            failures.append(label)
            print(f"{label}: {error}", flush=True)
    report(failures, f"{done} uses of the layer on CUDA equal those on the CPU")


if __name__ == "__main__":
    main()
